// The page: what is chosen, and who has to show it.

const state = { sides: data.policies.length > 1 ? [0, 1] : [0], layer: null, head: null, token: null };
let maps = [];
let text = null;

const HINT = "Point at a token to see which heads keep it; click to select it.";

const shown = () => state.sides.map((side) => data.policies[side]);

/** Show other policies. */
async function open(sides) {
  state.sides = sides;
  await Promise.all(shown().map(inflate));
  document.body.dataset.sides = sides.length;
  showPolicies();
  maps = shown().map((policy) => makeMap(policy, (token) => text.goTo(token)));
  document.getElementById("maps").replaceChildren(...maps.map(({ element }) => element), makeAxis());
  makeHeads(shown(), choose, preview);
  text = new PromptText(sides.length, pointAt);
  showChosen();
  pointAt(null, false);
}

/** Show what the chosen layer and head keep (null: all of them). */
function showChosen() {
  maps.forEach((map) => drawMap(map, state.layer, state.head));
  show(state.layer, state.head);
}

/** Show what a layer and head keep, but for the maps, which take longer than a pointer stays on a head. */
function show(layer, head) {
  const heads = chosenHeads(layer, head);
  const counts = shown().map((policy) => count(policy, layer, head));
  text.shadeBy(counts.map((kept) => shades(kept, heads)));
  showTurns(counts, heads);
  markHeads(layer, head, state.token);
  const chosen = [layer === null ? "All layers" : `Layer ${data.layers[layer]}`, head === null ? "all heads" : `head ${head}`];
  const sums = shown().map((policy) => make("div", {}, `${policy.policy}: ${sumOf(policy, layer, head)}`));
  document.getElementById("chosen").replaceChildren(make("b", {}, chosen.join(", ")), ...sums);
}

/** Shades by token; a character of several tokens has that of their mean. */
function shades(counts, heads) {
  const levels = new Uint8Array(tokens);
  for (let token = 0, stop; token < tokens; token = stop) {
    let sum = counts[token];
    for (stop = token + 1; stop < tokens && !data.token_texts[stop]; stop++) sum += counts[stop];
    levels.fill(shade(sum / heads / (stop - token)), token, stop);
  }
  return levels;
}

function sumOf(policy, layer, head) {
  const layers = layer === null ? policy.entries_per_head : [policy.entries_per_head[layer]];
  const kept = layers.flatMap((heads) => (head === null ? heads : [heads[head]])).reduce((sum, x) => sum + x, 0);
  const all = tokens * chosenHeads(layer, head);
  return `${whole(kept)} of ${whole(all)} entries (${percent(kept / all)})`;
}

/** Choose a layer and head; choosing the same again chooses all. */
function choose(layer, head) {
  const isSame = state.layer === layer && state.head === head;
  [state.layer, state.head] = isSame ? [null, null] : [layer, head];
  document.getElementById("layer").value = state.layer ?? "";
  document.getElementById("head").value = state.head ?? "";
  showChosen();
}

/** Show a layer and head as long as the pointer is there. */
function preview(layer = state.layer, head = state.head) {
  show(layer, head);
}

/** Tell of a token (null: of the one that was clicked last). */
function pointAt(token, isClick) {
  if (isClick && token !== null) state.token = token === state.token ? null : token;
  const at = token ?? state.token;
  text.mark(at);
  markHeads(state.layer, state.head, at);
  document.getElementById("token").replaceChildren(...(at === null ? [HINT] : describe(at)));
}

/** A token, and how many heads keep it. */
function describe(token) {
  const of = `of ${whole(chosenHeads(null, null))} heads`;
  const keeping = shown().map((policy) => make("div", {}, `${policy.policy}: kept by ${whole(headsWith(policy, token))} ${of}`));
  const name = make("code", {}, JSON.stringify(data.token_texts[characterOf(token)]));
  return [make("b", {}, `Token ${whole(token)} `), name, ` id ${data.token_ids[token]}`, ...keeping];
}

function headsWith(policy, token) {
  let sum = 0;
  for (const layer of data.layers.keys()) {
    for (let head = 0; head < data.kv_heads; head++) sum += keeps(policy, layer, head, token);
  }
  return sum;
}

function showPolicies() {
  const cards = shown().map((policy, side) => {
    const part = policy.entries.kept / policy.entries.of;
    const bar = make("div", { className: "bar" });
    bar.style.setProperty("--part", part);
    const kept = ` of the KV cache kept: ${whole(policy.entries.kept)} of ${whole(policy.entries.of)} entries`;
    const memory = `memory ${sizes(policy.bytes.before, policy.bytes.after)}`;
    const budget = policy.budget <= 1 ? `${percent(policy.budget)} of ${data.turns.length ? "each turn" : "the prompt"}` : `${whole(policy.budget)} tokens per head`;
    const share = make("span", {}, make("b", { className: "kept" }, percent(part)), kept);
    const facts = make("p", { className: "facts" }, share, make("span", {}, memory));
    const title = make("h2", {}, policyName(side), make("small", {}, `budget ${budget}`));
    return make("article", {}, title, bar, facts);
  });
  document.getElementById("policies").replaceChildren(...cards);
}

/** A policy's name, as a choice if there are several. */
function policyName(side) {
  if (data.policies.length === 1) return data.policies[0].policy;
  const options = data.policies.map(({ policy }, index) => new Option(policy, index));
  if (side) options.push(new Option("none", ""));
  const select = make("select", {}, ...options);
  select.setAttribute("aria-label", side ? "Policy on the right" : "Policy on the left");
  select.value = state.sides[side];
  select.onchange = () => open(select.value === "" ? [state.sides[0]] : state.sides.with(side, Number(select.value)));
  const more = make("button", { type: "button", onclick: () => open([...state.sides, 0]) }, "compare");
  return state.sides.length > 1 ? select : make("span", {}, select, more);
}

function showFrame() {
  document.title = `${data.policies.map(({ policy }) => policy).join(", ")}: what is kept of a prompt`;
  const heads = `${data.layers.length} layers of ${data.kv_heads} KV heads`;
  let about = `${data.model} · ${whole(tokens)} tokens · ${heads}`;
  if (data.turns.length) {
    about += ` · evicted turn by turn, the last time after ${whole(data.evicted_tokens)} tokens`;
  } else if (data.answer) {
    about += ` · an answer begins before policies that wait for it evict: “${data.answer}”`;
  } else if (data.evicted_tokens < tokens) {
    about += ` · evicted after ${whole(data.evicted_tokens)} tokens; all later tokens are kept`;
  }
  document.getElementById("about").textContent = about;
  const items = SHADES.map((name, level) => make("li", {}, make("span", { className: `shade-${level}` }, "text"), ` ${name}`));
  document.getElementById("legend").replaceChildren(make("li", {}, "Share of the heads that keep a token:"), ...items);
  const all = () => new Option("all", "");
  document.getElementById("layer").append(all(), ...data.layers.map((layer, index) => new Option(layer, index)));
  document.getElementById("head").append(all(), ...Array.from({ length: data.kv_heads }, (_, head) => new Option(head, head)));
}

function listenToPage() {
  const form = document.getElementById("choice");
  const number = (id) => (document.getElementById(id).value === "" ? null : Number(document.getElementById(id).value));
  form.onchange = () => {
    [state.layer, state.head] = [number("layer"), number("head")];
    showChosen();
  };
  form.onreset = () => {
    [state.layer, state.head] = [null, null];
    showChosen();
  };
  document.getElementById("text").onkeydown = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    let token = state.token === null ? 0 : Math.max(0, Math.min(tokens - 1, state.token + step));
    if (step < 0) token = characterOf(token);
    text.paint(text.rows.findLast(({ start }) => start <= token));
    pointAt(token === state.token ? null : token, true);
    text.spansOf(characterOf(token))[0]?.scrollIntoView({ block: "nearest" });
  };
  addEventListener("keydown", (event) => event.key === "Escape" && form.reset());
  addEventListener("beforeprint", () => text.paintAll());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showChosen);
}

showFrame();
showBranch();
await open(state.sides);
listenToPage();
// Two frames later the first shades are on the screen; tests read this.
requestAnimationFrame(() => requestAnimationFrame(() => (document.body.dataset.drawn = performance.now())));
