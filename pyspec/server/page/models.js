// With several models: the one that is asked, their states, and how far a load is.

const MODEL = 'pyspec.model', states = new Map();  // name -> status
let model = '';

const ofModel = path => model ? path + '?model=' + encodeURIComponent(model) : path;

const isAsleep = () => model !== '' && states.get(model)?.value !== 'loaded';

function drawModels() {
  const select = $('models'), at = states.get(model);
  select.replaceChildren(...[...states].map(([name, {value, failed}]) => {
    const option = make('option', '', name + (failed ? ' (failed)' : value === 'loaded' ? '' : ' (' + value + ')'));
    option.value = name;
    option.title = states.get(name).reason ?? '';
    return option;
  }));
  select.value = model;
  $('loading').hidden = !at?.progress;
  if (at?.progress) {
    $('loading').value = at.progress.value;
    $('loading').title = at.progress.current;
  }
}

function choose(name) {
  model = name;
  remember(MODEL, name);
  $('memory').replaceChildren();
  setSight(seeing.get(name));
  drawModels();
}

async function listModels() {
  const rows = (await get('v1/models')).data.filter(row => row.status);  // a server of one model has none
  states.clear();
  for (const row of rows) {
    states.set(row.id, row.status);
    seeing.set(row.id, row.architecture?.input_modalities?.includes('image'));
  }
  $('several').hidden = !rows.length;
  if (rows.length && !states.has(model)) {
    const kept = recall(MODEL), loaded = rows.find(row => row.status.value === 'loaded');
    choose(states.has(kept) ? kept : (loaded ?? rows[0]).id);
  }
  drawModels();
  return rows.length > 0;
}

async function watchModels() {
  try {
    if (!await listModels()) return;
    const response = await fetch('models/sse', {headers: headers()});
    if (!response.ok) throw new Error(response.statusText);
    for await (const {event, model: name, data} of events(response)) {
      if (event === 'model_status' && states.has(name)) states.set(name, {...data, value: data.status});
      else if (event !== 'download_progress') await listModels();
      drawModels();
    }
  } catch { /* not there, or not any more */ }
  setTimeout(watchModels, 3000);
}

$('models').addEventListener('change', () => choose($('models').value));
watchModels();
