// Where in the dashboard one is: the hash of the address, such as #/batches?state=dead.

/** The parts of the path, and the query. */
export function here() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return { parts: path.split("/").filter(Boolean).map(decoded), query: new URLSearchParams(query) };
}

/** An address: link(["run", "mine"], { smooth: 0.9 }). */
export function link(parts, query = {}) {
  return `#/${parts.map(encodeURIComponent).join("/")}${search(query)}`;
}

/** "?state=dead&limit=5". Values that are null are left out; a list repeats its name. */
export function search(query) {
  const pairs = Object.entries(query).flatMap(([name, value]) => [value].flat().map((each) => [name, each]));
  const given = new URLSearchParams(pairs.filter(([, value]) => value !== null && value !== undefined));
  return given.size ? `?${given}` : "";
}

/** Notes what a view shows in the address, so that it can be sent to others; "" notes nothing. The view stays as it is. */
export function note(changes) {
  const { parts, query } = here();
  const old = [...new Set(query.keys())].map((name) => [name, query.getAll(name)]);
  const noted = Object.entries(changes).map(([name, value]) => [name, value === "" ? null : value]);
  history.replaceState(null, "", link(parts, Object.fromEntries([...old, ...noted])));
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
