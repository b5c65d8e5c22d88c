// Elements are made by name and hold text as text: nothing of a row is ever parsed as markup.

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const el = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
const byId = (id) => document.getElementById(id);
const unique = (values) => [...new Set(values)];

function groupBy(values, key) {
  const groups = new Map();
  for (const value of values) {
    const k = key(value);
    if (!groups.has(k)) groups.set(k, []);
    groups.get(k).push(value);
  }
  return groups;
}
