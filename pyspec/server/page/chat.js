let running = null;  // {controller, chat} of the running answer

function figures(t) {
  let text = t.predicted_n + ' tokens, ' + t.predicted_per_second.toFixed(1) + ' tokens/s';
  if (t.draft_n) text += ', ' + t.draft_n_accepted + ' of ' + t.draft_n + ' drafted tokens accepted';
  if (t.cache_n) text += ', ' + t.cache_n + ' of ' + (t.cache_n + t.prompt_n) + ' prompt tokens from the cache';
  return text + (t.synthetic ? ' (synthetic acceptance)' : '');
}

function action(name, what, act) {
  const button = make('button', '', name);
  button.type = 'button';
  button.title = what;
  button.addEventListener('click', () => act(button));
  return button;
}

async function copy(text, button) {
  try { await navigator.clipboard.writeText(text); } catch {  // forbidden, or an insecure connection
    const area = make('textarea', '', text);
    document.body.append(area);
    area.select();
    document.execCommand('copy');
    area.remove();
  }
  button.textContent = 'Copied';
}

// Buttons of a turn; none while an answer is running.
function actions(turn) {
  const all = [action('Copy', 'Copy the text', button => copy(turn.content, button))];
  if (turn.role === 'user') all.push(action('Edit', 'Change the message and ask again from here', () => edit(turn)));
  else if (turn === chat.turns.at(-1)) all.push(action('Regenerate', 'Answer once more', () => again()));
  return make('div', 'actions', ...all);
}

function edit(turn) {
  const at = chat.turns.indexOf(turn), area = make('textarea', '', turn.content), node = $('log').children[at];
  const send = () => {
    const text = area.value.trim(), images = turn.images ?? [];
    if (running || !(text || images.length)) return;
    chat.turns.length = at;
    ask(text, images);
  };
  area.setAttribute('aria-label', 'Changed message');
  area.rows = Math.min(12, turn.content.split('\n').length + 1);
  area.addEventListener('keydown', event => {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    if (event.key === 'Escape') drawAll();
  });
  const cancel = action('Cancel', 'Leave it as it was', drawAll), ok = action('Send', 'Ask from here', send);
  node.replaceChildren(area, make('div', 'actions', ok, cancel));
  node.classList.add('edited');
  area.focus();
}

function again() {
  if (running) return;
  if (chat.turns.at(-1)?.role === 'assistant') chat.turns.pop();
  answer();
}

function draw(turn) {
  const node = make('div', 'turn ' + turn.role);
  if (turn.images?.length) node.append(shown(turn.images));
  if (turn.role === 'user') node.append(turn.content);
  else if ($('colour').checked && turn.pieces?.length) {
    node.classList.add('tokens');
    node.append(...turn.pieces.map(([text, drafted]) => make('span', drafted ? 'drafted' : 'own', text)));
  } else {
    if (turn.reasoning) node.append(make('details', '', make('summary', '', 'Reasoning'), turn.reasoning));
    node.append(markdown(turn.content));
  }
  if (turn.note) node.append(make('p', 'note', turn.note));
  if (!running) node.append(actions(turn));
  return node;
}

function drawAll() {
  $('log').replaceChildren(...chat.turns.map(draw));
  $('log').scrollTop = $('log').scrollHeight;
}

let isDue = false;
function drawLast() {  // once per frame, for any number of events
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

function ask(text, images) {
  chat.turns.push({role: 'user', content: text, ...images.length && {images}});
  return answer();
}

// Answers the last question.
async function answer() {
  const own = chat, controller = new AbortController(), system = $('system').value.trim();
  const said = own.turns.filter(turn => turn.content || turn.images?.length);
  const messages = said.map(turn => ({role: turn.role, content: contentOf(turn)}));
  if (system) messages.unshift({role: 'system', content: system});
  const turn = {role: 'assistant', content: '', reasoning: '', pieces: [], note: ''};
  own.turns.push(turn);
  running = {controller, chat: own};
  $('send').textContent = 'Stop';
  retitle();
  drawAll();
  try {
    const body = JSON.stringify({messages, stream: true, return_pieces: true, ...model && {model}, ...sampling()});
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
  drawAll();
}

$('form').addEventListener('submit', event => {
  event.preventDefault();
  if (running) return running.controller.abort();
  const text = $('text').value.trim(), images = takeAttached();
  $('text').value = '';
  if (text || images.length) ask(text, images);
});
$('text').addEventListener('keydown', event => {
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) { event.preventDefault(); $('form').requestSubmit(); }
});
$('colour').addEventListener('change', () => {
  $('legend').hidden = !$('colour').checked;
  drawAll();
});
$('new').addEventListener('click', () => { start(); drawAll(); $('text').focus(); });
$('chats').addEventListener('change', () => { chat = chats.find(c => c.id === $('chats').value) ?? chat; list(); drawAll(); });
$('save').addEventListener('click', download);
$('delete').addEventListener('click', () => {
  if (running?.chat === chat) running.controller.abort();
  chats = chats.filter(c => c !== chat);
  save();
  start();
  drawAll();
});

load();
resume();
drawAll();
