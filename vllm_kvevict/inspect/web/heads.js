// Layers and heads as bars, which choose what the text shows.

/** The bars of the shown policies; `choose(layer, head)` and `preview(layer, head)` are told of clicks and pointing. */
function makeHeads(policies, choose, preview) {
  const grid = document.getElementById("heads");
  grid.replaceChildren();
  const most = Math.max(...policies.flatMap((policy) => policy.entries_per_head.flat())) || 1;
  const columns = `repeat(${data.kv_heads}, minmax(4px, 2.2rem))`;
  grid.style.gridTemplateColumns = `max-content ${policies.map(() => `minmax(3.2rem, 1fr) ${columns}`).join(" 0.5rem ")}`;
  grid.style.gridAutoRows = `${Math.max(15, Math.min(30, 420 / data.layers.length))}px`;
  if (policies.length > 1) {
    grid.append(make("span"));
    policies.forEach((policy, side) => {
      const name = make("span", { className: "column" }, policy.policy);
      name.style.gridColumn = `span ${data.kv_heads + 1}`;
      if (side) grid.append(make("span"));
      grid.append(name);
    });
  }
  for (const layer of data.layers.keys()) {
    grid.append(layerButton(layer));
    policies.forEach((policy, side) => {
      if (side) grid.append(make("span"));
      const entries = policy.entries_per_head[layer];
      grid.append(meanBar(entries, most), ...entries.map((kept, head) => headButton(policy, layer, head, kept, most)));
    });
  }
  document.getElementById("scale").textContent =
    `A full bar is ${whole(most)} tokens, ${percent(most / tokens)} of the prompt. ` +
    `The number is the mean of the layer's ${data.kv_heads} KV heads.`;
  listen(grid, choose, preview);
}

function layerButton(layer) {
  const button = make("button", { type: "button", className: "layer" }, `${data.layers[layer]}`);
  button.setAttribute("aria-label", `Layer ${data.layers[layer]}, all heads`);
  return place(button, layer, null);
}

function meanBar(entries, most) {
  const mean = entries.reduce((sum, kept) => sum + kept, 0) / entries.length;
  const bar = make("span", { className: "mean" }, percent(mean / tokens));
  bar.style.setProperty("--part", mean / most);
  return bar;
}

function headButton(policy, layer, head, kept, most) {
  const button = make("button", { type: "button", className: "head" });
  const label = `${policy.policy}, layer ${data.layers[layer]}, head ${head}: ${whole(kept)} tokens, ${percent(kept / tokens)}`;
  button.title = label;
  button.setAttribute("aria-label", label);
  button.style.setProperty("--part", kept / most);
  button.policy = policy;
  return place(button, layer, head);
}

function place(button, layer, head) {
  button.tabIndex = layer === 0 && head === null ? 0 : -1;
  return Object.assign(button, { layer, head });
}

function listen(grid, choose, preview) {
  grid.onclick = ({ target }) => target.layer !== undefined && choose(target.layer, target.head);
  grid.onmouseover = ({ target }) => target.layer !== undefined && preview(target.layer, target.head);
  grid.onmouseleave = () => preview();
  grid.onkeydown = (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    moveFocus(grid, event.target, ...step);
  };
}

/** Put the focus on the button next to one: the layer's own, then its heads, of one policy after the other. */
function moveFocus(grid, from, down, right) {
  const lines = data.layers.map((_, layer) => [...grid.querySelectorAll("button")].filter((b) => b.layer === layer));
  const line = Math.max(0, Math.min(lines.length - 1, from.layer + down));
  const column = lines[from.layer].indexOf(from) + right;
  const to = lines[line][Math.max(0, Math.min(lines[line].length - 1, column))];
  from.tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
}

/** Mark the chosen layer or head, and the heads that keep a token (null for no token). */
function markHeads(layer, head, token) {
  for (const button of document.querySelectorAll("#heads button")) {
    const sameLayer = layer === null || button.layer === layer;
    const chosen = (layer !== null || head !== null) && sameLayer && (head === null || button.head === head);
    button.setAttribute("aria-pressed", chosen);
    const has = token !== null && button.policy && keeps(button.policy, button.layer, button.head, token);
    button.classList.toggle("has", Boolean(has));
  }
}
