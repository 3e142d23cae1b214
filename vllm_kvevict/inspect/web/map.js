// The map: a line for each layer, from the first token to the last, in the same shades as the text.

const MOST_COLUMNS = 1200;

function makeMap(policy, goTo) {
  const canvas = make("canvas", { width: Math.min(tokens, MOST_COLUMNS), height: data.layers.length });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `Layers and positions: where ${policy.policy} keeps tokens`);
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    const part = (x, size, count) => Math.max(0, Math.min(count - 1, Math.floor((x / size) * count)));
    return {
      token: part(event.clientX - box.left, box.width, tokens),
      layer: part(event.clientY - box.top, box.height, data.layers.length),
    };
  };
  canvas.addEventListener("click", (event) => goTo(at(event).token));
  canvas.addEventListener("mousemove", (event) => {
    const { token, layer } = at(event);
    canvas.title = `layer ${data.layers[layer]}, token ${whole(token)}: click to go there`;
  });
  const height = Math.max(32, Math.min(130, 14 * data.layers.length));
  canvas.style.height = `${height}px`;
  const name = make("span", { className: "name" }, policy.policy);
  const ends = make("span", { className: "ends" }, make("span", {}, "layer"), make("span", {}, `${data.layers[0]}`));
  ends.append(make("span", {}, `${data.layers.at(-1)}`));
  const strip = make("div", { className: "strip" }, canvas, ...data.turns.map(turnMark));
  return { element: make("div", { className: "map" }, name, ends, strip), canvas, policy };
}

/** A line where a turn ends; a broad one where the branch goes another way. */
function turnMark(end) {
  const mark = make("i", { className: end === branchesAt ? "branch" : "" });
  mark.style.left = `${(100 * end) / tokens}%`;
  return mark;
}

/** Draw the shares that the chosen heads keep; layers that are not chosen are pale. */
function drawMap(map, layer, head) {
  const { canvas, policy } = map;
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const colours = shadeColours();
  for (const line of data.layers.keys()) {
    const counts = count(policy, line, head);
    const alpha = layer === null || layer === line ? 255 : 70;
    for (let column = 0; column < canvas.width; column++) {
      const first = Math.floor((column * tokens) / canvas.width);
      const last = Math.floor(((column + 1) * tokens) / canvas.width);
      let sum = 0;
      for (let token = first; token < last; token++) sum += counts[token];
      const colour = colours[shade(sum / ((last - first) * chosenHeads(line, head)))];
      image.data.set([...colour, alpha], 4 * (line * canvas.width + column));
    }
  }
  context.putImageData(image, 0, 0);
}

/** The shades as [red, green, blue], in the colours of light or dark. */
function shadeColours() {
  const style = getComputedStyle(document.documentElement);
  return SHADES.map((_, level) => {
    const hex = style.getPropertyValue(`--shade-${level}`).trim();
    return [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
  });
}

/** Token numbers under the maps. */
function makeAxis() {
  const parts = tokens < 8 ? 1 : 4;
  const marks = Array.from({ length: parts + 1 }, (_, i) => Math.round((i * (tokens - 1)) / parts));
  return make("div", { className: "axis" }, ...marks.map((mark) => make("span", {}, whole(mark))));
}
