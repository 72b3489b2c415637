"use strict";
// All that comes from the nodes is put in as text, never as markup.
const token = new URLSearchParams(location.search).get("token") || "";
const $ = (id) => document.getElementById(id);
const history = []; // connections per second, the last two minutes
let view = null, filter = "", selected = "", opened = new Map();
let attention = null; // whether only nodes that need attention are shown; null until somebody has said so
const manyNodes = 20, levels = ["ok", "warn", "bad"]; // by a node's level

function cell(label, value, cls) {
  const td = document.createElement("td");
  td.dataset.label = label;
  td.textContent = value;
  if (cls) td.className = cls;
  return td;
}

function row(cells, cls) {
  const tr = document.createElement("tr");
  tr.append(...cells);
  if (cls) tr.className = cls;
  return tr;
}

function fill(id, rows, empty) {
  if (rows.length === 0) {
    const td = cell("", empty);
    td.colSpan = 9;
    rows = [row([td], "empty")];
  }
  $(id).tBodies[0].replaceChildren(...rows);
}

const time = (text) => new Date(text).toLocaleTimeString([], { hour12: false });
const took = (s) => (s === 0 ? "0 s" : s < 1 ? (s * 1000).toFixed(s < 0.01 ? 2 : 0) + " ms" : s.toFixed(1) + " s");
const rate = (r) => (r >= 100 ? r.toFixed(0) : r.toFixed(1));

const plural = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;

function drawNodes() {
  const all = view.nodes, only = attention === null ? all.length > manyNodes : attention;
  const rows = only ? all.filter((n) => n.level > 0) : all;
  $("attention").checked = only;
  fill("nodes", rows.map((n) => {
    const cls = levels[n.level], state = cell("State", (n.reasons || []).join("; ") || "in order", "why " + cls);
    if (!n.answers) {
      state.colSpan = 7;
      return row([cell("Node", n.node), state], cls);
    }
    return row([cell("Node", n.node), state, cell("Version", n.version), cell("Backend", n.backend),
      cell("Services", n.services, "n"), cell("Lag", took(n.lagSeconds), "n"),
      cell("Quarantined", n.quarantined, "n"), cell("Ejected", n.ejected, "n")], cls);
  }), only && all.length ? "every node is in order" : "no nodes");
  const hidden = all.length - rows.length;
  $("nodes-more").textContent = hidden && rows.length ? `${plural(hidden, "other node")} in order` : "";
  const lines = view.differences.map((d) => {
    const p = document.createElement("p");
    p.className = "bad";
    p.textContent = `${d.service} differs since ${time(d.since)}: ${named(d.nodes)}` +
      (d.behind ? " (behind the others)" : "");
    return p;
  });
  for (const note of view.notes) {
    const p = document.createElement("p");
    p.className = "dim";
    p.textContent = note;
    lines.push(p);
  }
  $("differences").replaceChildren(...lines);
}

function named(names) {
  const first = names.slice(0, 3), more = names.length - first.length;
  return first.join(", ") + (more ? ` and ${more} more` : "");
}
const nodesOf = (n) => (n.count > n.names.length ? plural(n.count, "node") : n.names.join(", "));

const nameOf = (p) => (p.port ? p.service + ":" + p.port : p.service);
const forOf = (p) => (p && p.for ? ` (${p.for})` : "");
const titleOf = (p) => nameOf(p) + forOf(p);
const shown = () => (view ? view.ports.filter((p) => titleOf(p).includes(filter)) : []);

function drawServices() {
  const rows = [];
  for (const p of shown()) {
    const name = nameOf(p);
    const tr = row([cell("Service", titleOf(p)), cell("Connections/s", rate(p.rate), "n"), cell("Nodes", p.nodes, "n")]);
    tr.dataset.name = name;
    tr.setAttribute("aria-selected", name === selected);
    rows.push(tr);
    for (const e of opened.get(name) || []) {
      const at = e.text || (e.address.includes(":") ? `[${e.address}]:${e.port}` : `${e.address}:${e.port}`);
      rows.push(row([cell("Endpoint", at, e.text ? "dim" : ""), cell("Connections/s", e.text ? "" : rate(e.rate), "n"),
        cell("Nodes", e.text ? "" : e.nodes, "n")], "endpoint"));
    }
  }
  fill("services", rows, filter ? "no Service has this in its name" : "no Service is programmed");
  const more = view ? view.portCount - view.ports.length : 0;
  $("services-more").textContent = more > 0 ? `and ${more} with fewer connections` : "";
}

function drawBad() {
  fill("bad", view.troubles.map((t) => row([cell("What", t.what, "wide " + (t.ejected ? "warn" : "bad")),
    cell("Nodes", nodesOf(t.nodes), "wide"), cell("Since", time(t.since), "t"), cell("Why", t.why, "why")])), "none");
  const more = view.troubleCount - view.troubles.length;
  $("bad-more").textContent = more > 0 ? `and ${more} more` : "";
}

function drawChanges() {
  fill("changes", view.changes.map((c) => {
    const more = c.count - (c.services || []).length;
    const services = (c.services || []).join(", ") + (more > 0 ? ` and ${more} more` : "");
    return row([cell("At", time(c.at), "t"), cell("Nodes", nodesOf(c.nodes)), cell("Services", services || "–", "wide"),
      cell("Elements", `+${c.added} ~${c.replaced} −${c.removed}`, "n t"), cell("Took", took(c.seconds), "n t")]);
  }), "no change since the proxies started");
}

function figure(id, text, bad) {
  $(id).textContent = text;
  $(id).parentElement.classList.toggle("bad", !!bad);
}

function drawFigures() {
  const nodes = view.nodes, of = (level) => nodes.filter((n) => n.level === level).length;
  figure("f-nodes", `${nodes.length - of(2)} of ${nodes.length}`, of(2) > 0);
  $("f-watch").textContent = "nodes in order" + (of(1) ? `, ${of(1)} to watch` : "");
  figure("f-lag", took(Math.max(0, ...nodes.map((n) => n.lagSeconds))));
  // One Service that all nodes reject is one; a node names only some of what it has.
  const most = (ejected, of) =>
    Math.max(0, view.troubles.filter((t) => t.ejected === ejected).length, ...nodes.map(of));
  const quarantined = most(false, (n) => n.quarantined), ejected = most(true, (n) => n.ejected);
  figure("f-quarantined", quarantined, quarantined > 0);
  figure("f-ejected", ejected, ejected > 0);
  figure("f-rate", rate(view.rate));
  history.push(view.rate);
  if (history.length > 60) history.shift();
  const top = Math.max(...history, 1);
  $("line").firstElementChild.setAttribute("d",
    history.map((r, i) => `${i ? "L" : "M"}${120 - (history.length - 1 - i) * 2} ${26 - (24 * r) / top}`).join(" "));
}

function draw(v) {
  const first = !view;
  view = v;
  if (first) drawMap(); // which has its names of Services from here
  const trouble = [v.error, v.topError].filter(Boolean).join("; ");
  $("trouble").hidden = !trouble;
  $("trouble").textContent = trouble;
  if (!v.error) {
    drawFigures();
    drawNodes();
    drawBad();
  }
  drawServices();
  drawChanges();
  $("state").textContent = `live, ${time(v.time)}, asked for ${took(v.seconds)}`;
  $("state").className = "live";
}

function ask(path, params) {
  return fetch(path + "?" + new URLSearchParams(params), { headers: { "X-Token": token } }).then(async (r) => {
    const text = await r.text();
    if (!r.ok) throw new Error(text.trim());
    return text;
  });
}

function toggle(name) {
  selected = name;
  if (opened.delete(name)) return drawServices();
  opened.set(name, [{ text: "asking the nodes" }]);
  drawServices();
  ask("service", { service: name }).then((text) => {
    const ports = JSON.parse(text).filter((p) => nameOf(p) === name);
    const list = ports.flatMap((p) => p.endpoints || []);
    if (opened.has(name)) opened.set(name, list.length ? list : [{ text: "no endpoint" }]);
  }, (err) => opened.set(name, [{ text: err.message }])).finally(drawServices);
}

function move(by) {
  const names = shown().map(nameOf);
  if (!names.length) return;
  const at = names.indexOf(selected);
  selected = names[Math.min(Math.max(at + by, 0), names.length - 1)];
  drawServices();
  document.querySelector("[aria-selected=true]").scrollIntoView({ block: "nearest" });
}

$("services").addEventListener("click", (e) => {
  const tr = e.target.closest("tr[data-name]");
  if (tr) toggle(tr.dataset.name);
});
$("filter").addEventListener("input", (e) => { filter = e.target.value.trim(); drawServices(); });
$("attention").addEventListener("change", (e) => { attention = e.target.checked; if (view) drawNodes(); });
$("help").addEventListener("click", () => $("keys").showModal());
$("explain").addEventListener("submit", (e) => {
  e.preventDefault();
  const form = new FormData(e.target), answer = $("answer");
  answer.hidden = false;
  answer.className = "";
  answer.textContent = "asking the node";
  ask("explain", { pod: form.get("pod"), service: form.get("service") }).then(
    (text) => { answer.textContent = text; },
    (err) => { answer.className = "bad"; answer.textContent = err.message; });
});
document.addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey || $("keys").open) return;
  if (e.target.matches("input:not([type=checkbox]), select")) {
    if (e.key === "Escape") e.target.blur();
    return;
  }
  const keys = {
    "/": () => $("filter").focus(), "e": () => $("explain").pod.focus(), "?": () => $("keys").showModal(),
    "j": () => move(1), "k": () => move(-1), "Enter": () => { if (selected) toggle(selected); },
    "a": () => $("attention").click(), "m": () => document.querySelector("#map [tabindex='0']")?.focus(),
    "t": () => {
      const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
    },
  };
  if (keys[e.key] && !e.target.matches("button, pre")) {
    e.preventDefault();
    keys[e.key]();
  }
});

const views = new EventSource("views?" + new URLSearchParams({ token }));
views.onmessage = (e) => draw(JSON.parse(e.data));
views.onerror = () => {
  $("state").textContent = token ? "connection lost, trying again" :
    "the token is missing: open the address that kubectl verdict dashboard printed";
  $("state").className = "lost";
};
