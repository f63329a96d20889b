// Settings sent with every question: a system prompt and sampling parameters. Stored in this browser; empty fields use the server's defaults.

const SETTINGS = 'pyspec.settings', NUMBERS = ['temperature', 'top_k', 'top_p', 'min_p', 'repeat_penalty', 'max_tokens', 'seed'];

const remember = (key, value) => { try { localStorage.setItem(key, value); } catch { /* the browser keeps nothing */ } };

function recall(key) {
  try { return localStorage.getItem(key); } catch { return null; }
}

function sampling() {
  const given = NUMBERS.map(name => [name, $(name).valueAsNumber]).filter(([, value]) => Number.isFinite(value));
  return Object.fromEntries(given);
}

function tellSettings() {
  const names = [$('system').value.trim() && 'system prompt', ...Object.entries(sampling()).map(([name, value]) => name + ' ' + value)];
  $('set').textContent = names.filter(Boolean).join(', ');
}

function loadSettings() {
  let kept = {};
  try { kept = JSON.parse(recall(SETTINGS)) ?? {}; } catch { /* as if there were none */ }
  for (const name of ['system', ...NUMBERS]) $(name).value = kept[name] ?? '';
  tellSettings();
}

// Show the server's defaults in empty fields.
function showDefaults(params) {
  for (const name of NUMBERS) {
    const value = params?.[name];
    if (typeof value === 'number') $(name).placeholder = name === 'seed' && !(value >= 0 && value < 2 ** 32 - 1) ? 'any' : value < 0 ? 'no limit' : String(+value.toFixed(4));
  }
}

$('settings').addEventListener('input', () => {
  remember(SETTINGS, JSON.stringify({system: $('system').value, ...sampling()}));
  tellSettings();
});
$('defaults').addEventListener('click', () => {
  remember(SETTINGS, '{}');
  loadSettings();
});
loadSettings();
