// What policies keep: bit sets by layer and head, read from the page, and how many of them have each token.

const page = JSON.parse(document.getElementById("data").textContent);
// Of two conversations the address says which one is shown.
const data = location.hash === "#branch" && page.branch ? page.branch : page;
const tokens = data.prompt_tokens;
const rowBytes = Math.ceil(tokens / 8);

/** The bit sets of a policy, one behind the other; each is read once. */
async function inflate(policy) {
  if (!policy.rows) {
    const letters = atob(policy.bits);
    const packed = new Uint8Array(letters.length);
    for (let i = 0; i < letters.length; i++) packed[i] = letters.charCodeAt(i);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    policy.rows = new Uint8Array(await new Response(stream).arrayBuffer());
    policy.bits = null;
  }
  return policy;
}

/** Whether a head keeps a token. */
function keeps(policy, layer, head, token) {
  const byte = policy.rows[(layer * data.kv_heads + head) * rowBytes + (token >> 3)];
  return ((byte >> (token & 7)) & 1) === 1;
}

/** How many of the chosen heads keep each token; null stands for all layers, or all heads. */
function count(policy, layer, head) {
  const counts = new Uint16Array(8 * rowBytes);
  for (const l of layer === null ? data.layers.keys() : [layer]) {
    for (let h = head ?? 0; h < (head === null ? data.kv_heads : head + 1); h++) {
      addRow(counts, policy.rows, (l * data.kv_heads + h) * rowBytes);
    }
  }
  return counts;
}

function addRow(counts, rows, start) {
  for (let byte = 0; byte < rowBytes; byte++) {
    let bits = rows[start + byte];
    for (let token = 8 * byte; bits; token++, bits >>= 1) counts[token] += bits & 1;
  }
}

/** Of how many heads `count` counts. */
function chosenHeads(layer, head) {
  return (layer === null ? data.layers.length : 1) * (head === null ? data.kv_heads : 1);
}

// Shades: none, shares up to each of these, all.
const STEPS = [0.05, 0.1, 0.2, 0.35, 0.5, 0.75];
const SHADES = ["none", ...STEPS.map((step) => `\u2264 ${100 * step} %`), "< 100 %", "all"];

/** The shade of a share, 0 to 8. */
function shade(share) {
  if (share <= 0 || share >= 1) return share <= 0 ? 0 : STEPS.length + 2;
  let level = 1;
  while (level <= STEPS.length && share > STEPS[level - 1]) level++;
  return level;
}

const whole = (number) => number.toLocaleString("en");
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

/** Two sizes, in the unit of the first one. */
function sizes(before, after) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  const unit = Math.min(units.length - 1, Math.floor(Math.log2(Math.max(1, before)) / 10));
  const [from, to] = [before, after].map((size) => size / 1024 ** unit);
  const digits = (size) => whole(Number(size.toFixed(size < 10 ? 2 : size < 100 ? 1 : 0)));
  return `${digits(from)} \u2192 ${digits(to)} ${units[unit]}`;
}

/** An element with attributes (or properties) and children. */
function make(tag, settings = {}, ...children) {
  const element = Object.assign(document.createElement(tag), settings);
  element.append(...children);
  return element;
}
