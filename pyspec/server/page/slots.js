const seen = new Map();  // slot -> {request, n, at} of the last poll, for its rate

function rate(slot, now) {
  const n = slot.next_token[0].n_decoded, last = seen.get(slot.id);
  seen.set(slot.id, {request: slot.request, n, at: now});
  if (!slot.is_processing || !last || last.request !== slot.request || now <= last.at) return '';
  return (1e3 * (n - last.n) / (now - last.at)).toFixed(0);
}

function positions(draft) {
  const bars = make('span', 'positions');
  draft.drafted_per_pos.forEach((n, i) => {
    const share = n ? draft.accepted_per_pos[i] / n : 0, bar = make('i', '');
    bar.style.height = (100 * share).toFixed(0) + '%';
    bar.title = 'token ' + (i + 1) + ': ' + (100 * share).toFixed(0) + ' % of ' + n;
    bars.append(bar);
  });
  return bars;
}

function row(slot, now) {
  const bar = make('progress', '');
  bar.max = slot.n_ctx;
  bar.value = slot.n_past;
  bar.title = slot.n_past + ' of ' + slot.n_ctx + ' tokens';
  const {draft} = slot, drafts = make('span', 'drafts', slot.is_processing ? String(draft.n_draft) : '');
  drafts.title = draft.reason ?? '';
  const accepted = draft.draft_n ? (100 * draft.draft_n_accepted / draft.draft_n).toFixed(0) + ' % ' : '';
  const all = [slot.id, slot.state, bar, rate(slot, now), drafts, make('span', '', accepted, positions(draft))];
  return make('tr', slot.state, ...all.map(cell => make('td', '', cell)));
}

function why(slots) {
  const groups = new Map();  // message -> numbers of its slots
  for (const {id, state, draft} of slots) {
    if (state !== 'decode' || !draft.reason) continue;
    const said = draft.n_draft ? 'drafts: ' + draft.reason : 'no drafts: ' + draft.reason;
    groups.set(said, [...groups.get(said) ?? [], id]);
  }
  return [...groups].map(([said, ids]) => make('p', 'note', (ids.length > 1 ? 'slots ' : 'slot ') + ids.join(', ') + ': ' + said));
}

function say(state) {
  $('state').textContent = $('state').dataset.state = state;
}

async function get(path) {
  const response = await fetch(path, {headers: headers()});
  const value = await response.json();
  if (!response.ok) throw Object.assign(new Error(value.error?.message ?? response.statusText), {status: response.status});
  return value;
}

async function watch() {
  try {
    say((await get('health')).status);
    const slots = isAsleep() ? [] : await get(ofModel('slots')), now = performance.now();
    $('slots').replaceChildren(...slots.map(slot => row(slot, now)));
    $('why').replaceChildren(...why(slots));
    if (!$('memory').firstChild && !isAsleep()) await props();
  } catch (error) {
    if (error.status === 503) say('loading');
    else if (!error.status) { say('no answer'); $('memory').replaceChildren(); }
    $('why').textContent = error.status ? error.message : '';
  }
  setTimeout(watch, document.hidden ? 5000 : 1000);
}

async function props() {
  const value = await get(ofModel('props')), plan = Object.entries(value.memory_plan ?? {}), all = plan.reduce((sum, [, n]) => sum + n, 0);
  $('model').textContent = [value.model_alias, value.device, value.draft.type === 'none' ? 'no drafter' : 'drafts by ' + value.draft.type].join(' · ');
  $('model').title = value.draft.note;
  setSight(value.modalities?.vision);
  showDefaults(value.default_generation_settings?.params);
  const bar = make('div', 'plan', ...plan.map(([name, n]) => {
    const part = make('i', '');
    part.style.width = 100 * n / all + '%';
    part.title = name + ' ' + size(n);
    return part;
  }));
  $('memory').replaceChildren(bar, plan.map(([name, n]) => name + ' ' + size(n)).join(', ') + (all ? '; ' + size(all) + ' in all' : ''));
}

$('keys').addEventListener('submit', event => event.preventDefault());
watch();
