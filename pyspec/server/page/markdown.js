// Markdown as models write it, to DOM nodes: headings, lists, quotes, tables, rules, code, emphasis, strikethrough, links. Line breaks stay
// (style.css). An unclosed mark counts as text, so that a growing answer can be shown.

const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|\*(?=[^\s*])([^*]*[^\s*])\*|\[([^\]\n]*)\]\((https?:\/\/[^\s)]+)\)|~~(?=\S)([\s\S]*?\S)~~/;

function inline(text, parent) {
  for (let match; (match = INLINE.exec(text));) {
    parent.append(text.slice(0, match.index));
    const [all, ticks, code, strong, weak, name, address, struck] = match;
    if (ticks) parent.append(make('code', '', code));
    else if (address) parent.append(link(name || address, address));
    else if (struck !== undefined) parent.append(inline(struck, make('del', '')));
    else parent.append(inline(strong ?? weak, make(strong !== undefined ? 'strong' : 'em', '')));
    text = text.slice(match.index + all.length);
  }
  parent.append(text);
  return parent;
}

function link(name, address) {
  const node = make('a', '', name);
  node.href = address;
  node.rel = 'noopener noreferrer';
  node.target = '_blank';
  return node;
}

function codeBlock(lines, language) {
  const text = lines.join('\n'), button = make('button', '', 'Copy');
  button.type = 'button';
  button.addEventListener('click', () => navigator.clipboard?.writeText(text).then(() => { button.textContent = 'Copied'; }));
  const code = make('code', '', text);
  code.dataset.language = language;
  return make('div', 'block', make('pre', '', code), button);
}

const cells = line => line.trim().replace(/^\||\|$/g, '').split('|').map(cell => cell.trim());
const isRule = line => line !== undefined && /^\s*\|?(\s*:?-+:?\s*\|)+\s*:?-*:?\s*$/.test(line);

function tableOf(lines) {
  const row = (line, tag) => make('tr', '', ...cells(line).map(cell => inline(cell, make(tag, ''))));
  return make('table', '', row(lines[0], 'th'), ...lines.slice(2).map(line => row(line, 'td')));
}

// The matching lines from `i` on.
function take(lines, i, test) {
  let end = i;
  while (end < lines.length && test(lines[end], end)) end += 1;
  return end;
}

const LINE = /^ {0,3}([-*_])([ \t]*\1){2,}[ \t]*$/, UNDERLINE = /^ {0,3}(=+|-{2,})[ \t]*$/;
const BULLET = /^(\s*)([-*+]|\d+[.)])\s+(.*)$/;

// A list from line i on; deeper items form a list in the item before them. Returns the node and the next line.
function listOf(lines, i) {
  const [, indent, mark] = BULLET.exec(lines[i]), list = make(/\d/.test(mark) ? 'ol' : 'ul', '');
  if (/\d/.test(mark)) list.start = parseInt(mark, 10);
  while (i < lines.length) {
    const match = LINE.test(lines[i]) ? null : BULLET.exec(lines[i]);
    if (!match) {
      if (!lines[i].trim() || !/^\s+/.test(lines[i]) || !list.lastChild) break;
      list.lastChild.append('\n', inline(lines[i].trim(), make('span', '')));
      i += 1;
    } else if (match[1].length > indent.length + 1 && list.lastChild) {
      const [node, end] = listOf(lines, i);
      list.lastChild.append(node);
      i = end;
    } else if (match[1].length < indent.length) break;
    else {
      list.append(inline(match[3], make('li', '')));
      i += 1;
    }
  }
  return [list, i];
}

function markdown(text) {
  const out = document.createDocumentFragment(), lines = text.split('\n');
  for (let i = 0; i < lines.length;) {
    const line = lines[i], fence = /^\s*(```+|~~~+)\s*([\w+#.-]*)/.exec(line), heading = /^(#{1,6})\s+(.*)$/.exec(line);
    if (fence) {
      const end = take(lines, i + 1, other => !other.trim().startsWith(fence[1]));
      out.append(codeBlock(lines.slice(i + 1, end), fence[2]));
      i = end + 1;
    } else if (heading) {
      out.append(inline(heading[2], make('h' + Math.min(5, heading[1].length + 2), '')));
      i += 1;
    } else if (LINE.test(line)) {
      out.append(make('hr', ''));
      i += 1;
    } else if (BULLET.test(line)) {
      const [node, end] = listOf(lines, i);
      out.append(node);
      i = end;
    } else if (/^\s*>/.test(line)) {
      const end = take(lines, i, other => /^\s*>/.test(other));
      const quote = make('blockquote', '');
      quote.append(markdown(lines.slice(i, end).map(other => other.replace(/^\s*>\s?/, '')).join('\n')));
      out.append(quote);
      i = end;
    } else if (line.includes('|') && isRule(lines[i + 1])) {
      const end = take(lines, i, other => other.includes('|'));
      out.append(tableOf(lines.slice(i, end)));
      i = end;
    } else if (!line.trim()) i += 1;
    else {
      const starts = other => !other.trim() || /^\s*(```|~~~|>|#{1,6}\s)/.test(other) || BULLET.test(other) || LINE.test(other) || UNDERLINE.test(other);
      const end = Math.max(i + 1, take(lines, i, (other, at) => at === i || !starts(other)));
      const under = UNDERLINE.exec(lines[end] ?? ''), tag = under ? (under[1][0] === '=' ? 'h3' : 'h4') : 'p';
      out.append(inline(lines.slice(i, end).join('\n'), make(tag, '')));
      i = end + (under ? 1 : 0);
    }
  }
  return out;
}
