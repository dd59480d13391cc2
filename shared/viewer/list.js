// The list that one came from to a group, for the next and the previous one.

const KEY = "tandem-list";

/** list: { ids, back, name }: the groups in their order, the address of the list, and what it is. */
export function remember(list) {
  sessionStorage.setItem(KEY, JSON.stringify(list));
}

/** Where a group is in the list: { at, ids, back, name }, or null. */
export function placeOf(id) {
  const list = JSON.parse(sessionStorage.getItem(KEY) ?? "null");
  const at = list?.ids.indexOf(id) ?? -1;
  return at < 0 ? null : { ...list, at };
}
