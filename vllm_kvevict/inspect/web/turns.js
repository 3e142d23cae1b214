// The turns of a conversation: what is kept of each, and which of them the branch has, too.

/** The token behind the last turn that both conversations begin with; none where there is no such turn. */
const branchesAt = data.turns[page.shared_turns - 1];

/** First tokens of the turns, and of what comes behind the last one. */
const edges = new Set([...data.turns, data.evicted_tokens]);

/** Say what is kept of each turn; `counts` has, for each shown policy, how many of the chosen heads keep a token. */
function showTurns(counts, heads) {
  document.getElementById("turns").hidden = !data.turns.length;
  if (!data.turns.length) return;
  const rows = [...data.turns, tokens].map((end, turn) => turnRow(turn, turn ? data.turns[turn - 1] : 0, end, counts, heads));
  const names = ["Turn", "Tokens", ...shown().map(({ policy }) => policy)].map((name) => make("th", { scope: "col" }, name));
  document.querySelector("#turns table").replaceChildren(make("tr", {}, ...names), ...rows.filter(Boolean));
}

/** A line of the table, null for what has no tokens. */
function turnRow(turn, start, end, counts, heads) {
  if (start === end) return null;
  const name = turn < data.turns.length ? `${turn + 1}` : "rest";
  const button = make("button", { type: "button", onclick: () => text.goTo(start) }, name);
  button.title = "Go to its first token";
  const row = make("tr", { className: end <= branchesAt ? "shared" : "" }, make("th", { scope: "row" }, button));
  row.append(make("td", {}, whole(end - start)));
  for (const kept of counts) {
    let sum = 0;
    for (let token = start; token < end; token++) sum += kept[token];
    const part = sum / heads / (end - start);
    const cell = make("td", {}, percent(part));
    cell.style.setProperty("--part", part);
    row.append(cell);
  }
  return row;
}

/** Say of two conversations what they share, with the way to the other one. */
function showBranch() {
  if (!page.branch) return;
  const other = data === page ? "the branch" : "the conversation that it branches off from";
  const link = make("a", { href: data === page ? "#branch" : "#" }, other);
  const last = page.shared_turns;
  const shared = last ? `${last > 1 ? `turns 1 to ${last}` : "turn 1"}, ${whole(branchesAt)} tokens` : "no turn";
  document.getElementById("branch").replaceChildren(`Shared with `, link, `: ${shared}`);
  addEventListener("hashchange", () => location.reload());
}
