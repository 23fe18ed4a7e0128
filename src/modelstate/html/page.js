"use strict";
// Shows the rows of the page as a table: folded by module, searched or sorted. Text goes in as text, never as markup.
const { columns, rows } = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const MAX_DEPTH = 60; // the parts of a name that become levels of the tree; the rest is one level
const CHUNK = 400; // rows that are added to the table at once

function toggleTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const root = document.documentElement;
  const now = root.dataset.theme || (dark ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
}
byId("theme").addEventListener("click", toggleTheme);

function sizeText(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (bytes >= 999.95 && unit < units.length - 1) { bytes /= 1000; unit += 1; }
  return `${unit ? bytes.toFixed(1) : bytes} ${units[unit]}`;
}

function cellText(value, kind) {
  if (value === null || value === "") return "";
  if (kind === "bytes") return sizeText(value);
  if (kind === "count") return value.toLocaleString("en");
  if (kind === "share") return `${Number((value * 100).toPrecision(3))}%`;
  if (typeof value === "number") return String(Number(value.toPrecision(4)));
  return String(value);
}

// The tree of dotted names. A module with one child is joined with it.
function treeOf(rows) {
  const root = { path: "", label: "", children: new Map(), row: null };
  for (const row of rows) {
    let node = root;
    const parts = String(row[0]).split(".");
    if (parts.length > MAX_DEPTH) parts.push(parts.splice(MAX_DEPTH - 1).join("."));
    for (const part of parts) {
      if (!node.children.has(part)) {
        const path = node === root ? part : `${node.path}.${part}`;
        node.children.set(part, { path, label: part, children: new Map(), row: null });
      }
      node = node.children.get(part);
    }
    node.row = row;
  }
  const settle = (node) => {
    node.children = [...node.children.values()].map(settle);
    if (node !== root && !node.row && node.children.length === 1) {
      const [child] = node.children;
      return { ...child, label: `${node.label}.${child.label}` };
    }
    if (node.row && node.children.length) {
      // A tensor whose name begins the names of others is a line of its own among them.
      node.children.unshift({ path: node.path, label: node.label, children: [], total: node.row });
    }
    node.total = node.children.length ? total(node) : node.row;
    return node;
  };
  return settle(root);
}

// What a module shows: the sum of sizes and counts, the greatest or least measure, and text that all parts have in common.
function total(node) {
  const parts = node.children.map((child) => child.total);
  return columns.map(({ kind }, i) => {
    if (i === 0) return node.path;
    const values = parts.map((part) => part[i]);
    const numbers = values.filter((value) => value !== null);
    if (kind === "text") return values.every((value) => value === values[0]) ? values[0] : null;
    if (!numbers.length || kind === "own") return null;
    const sign = { measure: 1, share: 1, least: -1 }[kind];
    if (sign) return numbers.reduce((most, value) => (sign * order(value, most) > 0 ? value : most));
    return numbers.reduce((sum, value) => sum + value, 0);
  });
}

const alphabet = new Intl.Collator("en", { numeric: true });

// Numbers by size, the texts "inf" and "nan" behind them, other text by the alphabet, nothing last.
function order(a, b) {
  const rank = (value) => (value === null ? -1 : typeof value === "number" ? 0 : 1);
  if (rank(a) !== rank(b)) return rank(a) - rank(b);
  if (typeof a === "number") return a - b;
  return alphabet.compare(String(a), String(b));
}

const state = { query: "", sort: null, down: true, fold: true, open: new Set(), shown: CHUNK };
const tree = rows.length ? treeOf(rows) : null;

function visible() {
  const words = state.query.toLowerCase().split(/\s+/).filter(Boolean);
  const found = words.length
    ? rows.filter((row) => { const text = row.join(" ").toLowerCase(); return words.every((word) => text.includes(word)); })
    : rows;
  const sorted = (list, key) => {
    if (state.sort === null) return list;
    const sign = state.down ? -1 : 1;
    return [...list].sort((a, b) => sign * order(key(a)[state.sort], key(b)[state.sort]));
  };
  if (!state.fold || words.length) {
    return { found, lines: sorted(found, (row) => row).map((row) => ({ row, label: row[0], depth: 0 })) };
  }
  const lines = [];
  const add = (node, depth) => {
    for (const child of sorted(node.children, (item) => item.total)) {
      const group = child.children.length > 0;
      lines.push({ row: child.total, label: child.label, depth, path: group ? child.path : null });
      if (group && state.open.has(child.path)) add(child, depth + 1);
    }
  };
  add(tree, 0);
  return { found, lines };
}

function lineElement({ row, label, depth, path }) {
  const line = document.createElement("tr");
  columns.forEach(({ kind }, i) => {
    const cell = line.insertCell();
    if (kind !== "text") cell.className = "number";
    if (i > 0) { cell.textContent = cellText(row[i], kind); return; }
    cell.style.paddingLeft = `${0.6 + depth * 1.2}rem`;
    if (!path) { cell.textContent = label; return; }
    line.className = "group";
    const button = document.createElement("button");
    const open = state.open.has(path);
    button.type = "button";
    button.dataset.path = path;
    button.setAttribute("aria-expanded", String(open));
    button.textContent = `${open ? "▾" : "▸"} ${label}`;
    button.addEventListener("click", () => {
      if (open) state.open.delete(path); else state.open.add(path);
      draw();
      document.querySelector(`button[data-path="${CSS.escape(path)}"]`)?.focus();
    });
    cell.append(button);
  });
  return line;
}

function draw() {
  const { found, lines } = visible();
  byId("body").replaceChildren(...lines.slice(0, state.shown).map(lineElement));
  byId("count").textContent = `${found.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")}`;
  byId("more").hidden = lines.length <= state.shown;
  [...byId("head").children].forEach((cell, i) => {
    cell.setAttribute("aria-sort", state.sort !== i ? "none" : state.down ? "descending" : "ascending");
    cell.firstChild.textContent = columns[i].title + (state.sort !== i ? "" : state.down ? " ↓" : " ↑");
  });
}

if (rows.length) {
  columns.forEach(({ title, kind }, i) => {
    const cell = document.createElement("th");
    cell.scope = "col";
    if (kind !== "text") cell.className = "number";
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = title;
    button.addEventListener("click", () => {
      [state.down, state.sort] = state.sort === i ? [!state.down, i] : [kind !== "text", i];
      draw();
    });
    cell.append(button);
    byId("head").append(cell);
  });
  // The module that has everything is open from the start; there is nothing to fold where no name has a dot.
  let top = tree;
  while (top.children.length === 1 && top.children[0].children.length) [top] = top.children;
  if (top !== tree) state.open.add(top.path);
  byId("fold").hidden = tree.children.every((node) => !node.children.length);
  byId("search").addEventListener("input", (event) => { state.query = event.target.value; state.shown = CHUNK; draw(); });
  byId("fold").addEventListener("click", (event) => {
    state.fold = !state.fold;
    state.shown = CHUNK;
    event.target.setAttribute("aria-pressed", String(state.fold));
    draw();
  });
  byId("more").addEventListener("click", () => { state.shown += CHUNK; draw(); });
  draw();
}
