let running = null;  // {controller, chat} of the answer that is under way

function figures(t) {
  let text = t.predicted_n + ' tokens, ' + t.predicted_per_second.toFixed(1) + ' tokens/s';
  if (t.draft_n) text += ', ' + t.draft_n_accepted + ' of ' + t.draft_n + ' drafted tokens accepted';
  if (t.cache_n) text += ', ' + t.cache_n + ' of ' + (t.cache_n + t.prompt_n) + ' prompt tokens from the cache';
  return text + (t.synthetic ? ' (synthetic acceptance)' : '');
}

function draw(turn) {
  const node = make('div', 'turn ' + turn.role);
  if (turn.role === 'user') node.append(turn.content);
  else if ($('colour').checked && turn.pieces?.length) {
    node.classList.add('tokens');
    node.append(...turn.pieces.map(([text, drafted]) => make('span', drafted ? 'drafted' : 'own', text)));
  } else {
    if (turn.reasoning) node.append(make('details', '', make('summary', '', 'Reasoning'), turn.reasoning));
    node.append(markdown(turn.content));
  }
  if (turn.note) node.append(make('p', 'note', turn.note));
  return node;
}

function drawAll() {
  $('log').replaceChildren(...chat.turns.map(draw));
  $('log').scrollTop = $('log').scrollHeight;
}

let isDue = false;
function drawLast() {  // once a frame, however many events came
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    const log = $('log'), turn = chat.turns.at(-1), isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    if (!turn) return log.replaceChildren();
    const was = log.children[chat.turns.length - 1], open = was?.querySelector('details')?.open;
    if (was) was.replaceWith(draw(turn)); else log.append(draw(turn));
    const details = log.lastChild.querySelector('details');
    if (details) details.open = open ?? !turn.content;
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  });
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = '';;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (rest + value).split('\n\n');
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith('data: ') && part !== 'data: [DONE]') yield JSON.parse(part.slice(6));
    }
  }
}

function see(turn, event) {
  const delta = event.choices[0]?.delta ?? {};
  turn.content += delta.content ?? '';
  turn.reasoning += delta.reasoning_content ?? '';
  for (const piece of event.pieces ?? []) turn.pieces.push(piece);
  if (event.timings) turn.note = figures(event.timings);
}

async function ask(text) {
  const own = chat, controller = new AbortController();
  own.turns.push({role: 'user', content: text});
  const messages = own.turns.filter(turn => turn.content).map(({role, content}) => ({role, content}));
  const turn = {role: 'assistant', content: '', reasoning: '', pieces: [], note: ''};
  own.turns.push(turn);
  running = {controller, chat: own};
  $('send').textContent = 'Stop';
  retitle();
  drawAll();
  try {
    const body = JSON.stringify({messages, stream: true, return_pieces: true});
    const response = await fetch('v1/chat/completions', {method: 'POST', headers: headers(), body, signal: controller.signal});
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      see(turn, event);
      if (own === chat) drawLast();
    }
  } catch (error) {
    turn.note = error.name === 'AbortError' ? 'stopped' : String(error.message);
  }
  running = null;
  $('send').textContent = 'Send';
  save();
  if (own === chat) drawLast();
}

$('form').addEventListener('submit', event => {
  event.preventDefault();
  if (running) return running.controller.abort();
  const text = $('text').value.trim();
  $('text').value = '';
  if (text) ask(text);
});
$('text').addEventListener('keydown', event => {
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) { event.preventDefault(); $('form').requestSubmit(); }
});
$('colour').addEventListener('change', drawAll);
$('new').addEventListener('click', () => { start(); drawAll(); $('text').focus(); });
$('chats').addEventListener('change', () => { chat = chats.find(c => c.id === $('chats').value) ?? chat; drawAll(); });
$('delete').addEventListener('click', () => {
  if (running?.chat === chat) running.controller.abort();
  chats = chats.filter(c => c !== chat);
  save();
  start();
  drawAll();
});

load();
start();
drawAll();
