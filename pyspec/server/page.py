"""`/`: one page to chat on and to watch the slots from. No build step, nothing loaded from elsewhere.

All text goes in through textContent, and the content security policy allows exactly this script and this style, by
their hashes, so nothing a model writes can run.
"""

from __future__ import annotations

import base64
import hashlib

from starlette.requests import Request
from starlette.responses import Response

STYLE = """
:root { color-scheme: light dark; --dim: color-mix(in srgb, currentColor 55%, transparent); }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0; display: flex; flex-wrap: wrap; min-height: 100vh; }
main { flex: 3 1 28rem; display: flex; flex-direction: column; padding: 1rem; box-sizing: border-box; }
aside { flex: 1 1 20rem; padding: 1rem; border-left: 1px solid var(--dim); font-size: 13px; }
h1 { font-size: 1rem; margin: 0 0 .5rem; }
#log { flex: 1; overflow-y: auto; min-height: 12rem; }
.turn { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 0 .75rem; }
.user { font-weight: 600; }
.note { color: var(--dim); font-size: 12px; margin: -.5rem 0 .75rem; }
form { display: flex; gap: .5rem; }
textarea { flex: 1; font: inherit; resize: vertical; }
button, input { font: inherit; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .15rem .4rem .15rem 0; vertical-align: top; }
progress { width: 5rem; }
"""

SCRIPT = """
'use strict';
const $ = id => document.getElementById(id);
const messages = [];
let running = null;

function headers() {
  const key = $('key').value;
  return key ? {'Content-Type': 'application/json', 'Authorization': 'Bearer ' + key}
             : {'Content-Type': 'application/json'};
}

function add(kind, text) {
  const node = document.createElement('div');
  node.className = kind;
  node.textContent = text;
  $('log').append(node);
  node.scrollIntoView({block: 'end'});
  return node;
}

function figures(t) {
  let text = t.predicted_n + ' tokens, ' + t.predicted_per_second.toFixed(1) + ' tokens/s';
  if (t.draft_n) text += ', ' + t.draft_n_accepted + ' of ' + t.draft_n + ' drafted tokens accepted';
  return text + (t.synthetic ? ' (synthetic acceptance)' : '');
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = '';;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (rest + value).split('\\n\\n');
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith('data: ') && part !== 'data: [DONE]') yield JSON.parse(part.slice(6));
    }
  }
}

async function ask(text) {
  messages.push({role: 'user', content: text});
  add('turn user', text);
  const node = add('turn', '');
  running = new AbortController();
  $('send').textContent = 'Stop';
  try {
    const body = JSON.stringify({messages, stream: true});
    const options = {method: 'POST', headers: headers(), body, signal: running.signal};
    const response = await fetch('v1/chat/completions', options);
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      node.textContent += event.choices[0]?.delta.content ?? '';
      if (event.timings) add('note', figures(event.timings));
    }
  } catch (error) {
    add('note', error.name === 'AbortError' ? 'stopped' : String(error.message));
  }
  messages.push({role: 'assistant', content: node.textContent});
  running = null;
  $('send').textContent = 'Send';
}

function row(slot) {
  const line = document.createElement('tr');
  const bar = document.createElement('progress');
  bar.max = slot.n_ctx;
  bar.value = slot.n_past;
  bar.title = slot.n_past + ' of ' + slot.n_ctx + ' tokens';
  const draft = slot.draft.n_draft + (slot.draft.reason ? ' (' + slot.draft.reason + ')' : '');
  for (const cell of [slot.id, slot.state, bar, draft, (100 * slot.draft.acceptance).toFixed(0) + ' %']) {
    const node = document.createElement('td');
    node.append(cell);
    line.append(node);
  }
  return line;
}

async function watch() {
  try {
    const response = await fetch('slots', {headers: headers()});
    const value = await response.json();
    $('state').textContent = response.ok ? '' : value.error.message;
    if (response.ok) $('slots').replaceChildren(...value.map(row));
  } catch (error) {
    $('state').textContent = 'no answer';
  }
  setTimeout(watch, 1000);
}

$('form').addEventListener('submit', event => {
  event.preventDefault();
  if (running) return running.abort();
  const text = $('text').value.trim();
  $('text').value = '';
  if (text) ask(text);
});
$('text').addEventListener('keydown', event => {
  if (event.key === 'Enter' && !event.shiftKey) { event.preventDefault(); $('form').requestSubmit(); }
});
watch();
"""

PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>pyspec</title><style>{STYLE}</style></head><body>
<main><h1>pyspec</h1><div id="log" aria-live="polite"></div>
<form id="form"><textarea id="text" rows="2" aria-label="Message" autofocus></textarea>
<button id="send">Send</button></form></main>
<aside><h1>Slots</h1><table><thead><tr><th>slot<th>state<th>context<th>drafts<th>accepted</tr></thead>
<tbody id="slots"></tbody></table><p id="state" class="note"></p>
<label>API key <input id="key" type="password" autocomplete="off"></label></aside>
<script>{SCRIPT}</script></body></html>
""".encode()


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_hash(SCRIPT)}; style-src {_hash(STYLE)}; connect-src 'self'; "
        "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def page(request: Request) -> Response:
    """Answer with the page."""
    return Response(PAGE, media_type="text/html", headers=HEADERS)
