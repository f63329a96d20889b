// Pictures of the next message: pasted, dropped or chosen; kept as data URLs, which a turn has as `images`.

const KINDS = ['image/png', 'image/jpeg', 'image/webp', 'image/gif', 'image/bmp'];  // what the server reads
const MOST = 1.5e6, SIDE = 2048, MANY = 32;  // bytes of a file and pixels a side, above which a copy is sent; pictures of a conversation
const BLIND = 'This model reads no images: it was loaded without a projector (--mmproj)';
const seeing = new Map();  // name -> whether the model reads images, of several models
let attached = [], sees = false;

const shown = images => make('div', 'images', ...images.map(thumbnail));

function thumbnail(url) {
  const image = make('img', '');
  image.src = url;
  image.alt = 'image';
  return image;
}

// Whether the model that is asked reads images.
function setSight(value) {
  sees = Boolean(value);
  $('attach').disabled = !sees;
  $('attach').title = sees ? 'Add images: choose, paste or drop them' : BLIND;
}

function dataURL(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
}

// The file as it is, or a smaller copy on white.
async function urlOf(file) {
  if (KINDS.includes(file.type) && file.size <= MOST) return dataURL(file);
  const picture = await createImageBitmap(file), scale = Math.min(1, SIDE / Math.max(picture.width, picture.height));
  const canvas = make('canvas', ''), context = canvas.getContext('2d');
  canvas.width = Math.max(1, Math.round(picture.width * scale));
  canvas.height = Math.max(1, Math.round(picture.height * scale));
  context.fillStyle = '#fff';
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL('image/jpeg', 0.9);
}

function hint(text) {
  $('hint').textContent = text;
}

async function attach(files) {
  const pictures = [...files].filter(file => file.type.startsWith('image/'));
  if (pictures.length && !sees) return hint(BLIND);
  hint(pictures.length < files.length ? 'Only images can be added' : '');
  for (const file of pictures) {
    const n = attached.length + chat.turns.reduce((sum, turn) => sum + (turn.images?.length ?? 0), 0);
    if (n >= MANY) return hint('A conversation has at most ' + MANY + ' images');
    try { attached.push(await urlOf(file)); } catch { hint(file.name + ' can not be read as an image'); }
    drawAttached();
  }
}

function drawAttached() {
  $('attached').replaceChildren(...attached.map((url, i) => {
    const button = make('button', '', '×');
    button.type = 'button';
    button.title = 'Leave this image out';
    button.addEventListener('click', () => { attached.splice(i, 1); drawAttached(); });
    return make('span', 'thumb', thumbnail(url), button);
  }));
}

// The pictures of the message that is sent now.
function takeAttached() {
  const taken = attached;
  attached = [];
  hint('');
  drawAttached();
  return taken;
}

// The content of a turn as a body has it.
function contentOf({content, images}) {
  if (!images?.length) return content;
  const parts = images.map(url => ({type: 'image_url', image_url: {url}}));
  return content ? [...parts, {type: 'text', text: content}] : parts;
}

$('attach').addEventListener('click', () => $('file').click());
$('file').addEventListener('change', () => { attach([...$('file').files]); $('file').value = ''; });
$('text').addEventListener('paste', event => {
  const {files} = event.clipboardData;
  if (!files.length) return;
  event.preventDefault();
  attach(files);
});
document.addEventListener('dragover', event => {
  if (event.dataTransfer.types.includes('Files')) event.preventDefault();
});
document.addEventListener('drop', event => {
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();
  attach(event.dataTransfer.files);
});
setSight(false);
