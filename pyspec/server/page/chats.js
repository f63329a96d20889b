// Conversations, stored only in this browser. One is {id, title, turns}; a turn is {role, content, images, reasoning, pieces, note}.

const KEY = 'pyspec.chats', LAST = 'pyspec.last';
let chats = [], chat = null;

function load() {
  try {
    const value = JSON.parse(recall(KEY));
    chats = Array.isArray(value) ? value.filter(c => c && typeof c.id === 'string' && Array.isArray(c.turns)) : [];
  } catch { chats = []; }
}

function save() {
  const kept = chats.filter(c => c.turns.length);
  for (;;) {  // the browser's storage is limited: the oldest are dropped first, of all their images before any text
    try { return localStorage.setItem(KEY, JSON.stringify(kept)); } catch {
      const at = kept.findLastIndex(c => c.turns.some(turn => turn.images?.length));
      if (at >= 0) kept[at] = {...kept[at], turns: kept[at].turns.map(({images, ...rest}) => images ? {...rest, note: 'its images were not kept'} : rest)};
      else if (kept.pop() === undefined) return;
    }
  }
}

function start() {
  if (chats[0] && !chats[0].turns.length) chat = chats[0];
  else chats.unshift(chat = {id: crypto.randomUUID?.() ?? String(Math.random()), title: 'New conversation', turns: []});
  list();
}

// The last open conversation, or a new one.
function resume() {
  const last = chats.find(c => c.id === recall(LAST));
  if (last) { chat = last; list(); } else start();
}

function list() {
  remember(LAST, chat.id);
  $('chats').replaceChildren(...chats.map(c => {
    const option = make('option', '', c.title);
    option.value = c.id;
    option.selected = c === chat;
    return option;
  }));
}

function retitle() {
  const first = chat.turns.find(turn => turn.role === 'user');
  if (first) chat.title = first.content.slice(0, 60) || 'Image';
  list();
  save();
}

// The open conversation as a file of Markdown.
function download() {
  const text = chat.turns.map(turn => '## ' + turn.role + '\n\n' + '[image] '.repeat(turn.images?.length ?? 0) + turn.content + '\n').join('\n');
  const link = make('a', '');
  link.href = URL.createObjectURL(new Blob([text], {type: 'text/markdown'}));
  link.download = chat.title.replace(/[^\p{L}\p{N} .-]/gu, '_') + '.md';
  link.click();
  URL.revokeObjectURL(link.href);
}
