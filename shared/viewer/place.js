// The current place in the dashboard: the hash of the address, such as #/batches?state=dead; and the list a group was opened from.

const LIST = "tandem-list";

/** The parts of the path, and the query. */
export function here() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return { parts: path.split("/").filter(Boolean).map(decoded), query: new URLSearchParams(query) };
}

/** An address: link(["run", "mine"], { smooth: 0.9 }). */
export function link(parts, query = {}) {
  return `#/${parts.map(encodeURIComponent).join("/")}${search(query)}`;
}

/** "?state=dead&limit=5". Null values are omitted; a list repeats its name. */
export function search(query) {
  const pairs = Object.entries(query).flatMap(([name, value]) => [value].flat().map((each) => [name, each]));
  const parameters = new URLSearchParams(pairs.filter(([, value]) => value !== null && value !== undefined));
  return parameters.size ? `?${parameters}` : "";
}

/** The key of a run and its lineage in an address. */
export const keyOf = ({ run, lineage }) => `${lineage}/${run}`;

/** A run's name, with its lineage if several trainings share the name. */
export function labelOf({ run, lineage }, all) {
  return all.filter((other) => other.run === run).length > 1 ? `${run} (${lineage || "no lineage"})` : run;
}

/** Records a view's settings in the address, so that it can be shared; "" removes a setting. The view is not redrawn. */
export function note(changes) {
  const { parts, query } = here();
  const old = [...new Set(query.keys())].map((name) => [name, query.getAll(name)]);
  const changed = Object.entries(changes).map(([name, value]) => [name, value === "" ? null : value]);
  history.replaceState(null, "", link(parts, Object.fromEntries([...old, ...changed])));
}

/**
 * What the address says of a view's settings; "" where it says nothing.
 * @template {string} Name
 * @param {URLSearchParams} query
 * @param {Name[]} names
 * @returns {Record<Name, string>}
 */
export function valuesOf(query, names) {
  return /** @type {Record<Name, string>} */ (Object.fromEntries(names.map((name) => [name, query.get(name) ?? ""])));
}

/** The zoom of a view's plots, which is kept in the address: { range, set }. */
export function zoomOf(query) {
  const range = ["from", "to"].map((name) => Number(query.get(name) ?? Number.NaN));
  return {
    range: range[0] < range[1] ? range : null,
    set(next) {
      this.range = next;
      note({ from: next && Number(next[0].toPrecision(6)), to: next && Number(next[1].toPrecision(6)) });
    },
  };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** Remembers the list from which a group is opened: { ids, back, name }, its groups, address and title. */
export function remember(list) {
  sessionStorage.setItem(LIST, JSON.stringify(list));
}

/** The position of a group in that list: { at, ids, back, name }, or null. */
export function placeOf(id) {
  const list = JSON.parse(sessionStorage.getItem(LIST) ?? "null");
  const at = list?.ids.indexOf(id) ?? -1;
  return at < 0 ? null : { ...list, at };
}
