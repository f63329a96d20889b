const $ = id => document.getElementById(id);

// An element with a class and children: strings become text, never markup.
function make(tag, kind, ...children) {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  node.append(...children);
  return node;
}

function headers() {
  const key = $('key').value, value = {'Content-Type': 'application/json'};
  if (key) value.Authorization = 'Bearer ' + key;
  return value;
}

function size(n) {
  for (const unit of ['B', 'KiB', 'MiB']) {
    if (n < 1024) return n.toFixed(unit === 'B' ? 0 : 1) + ' ' + unit;
    n /= 1024;
  }
  return n.toFixed(2) + ' GiB';
}
