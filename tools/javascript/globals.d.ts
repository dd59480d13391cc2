// What the pages find in the browser beside the standard: the records of the server's API, and the plotting library.

/** The answers of the server by the names of their classes in shared/api/, from which `make lint-js` generates them. */
type Api = import("./build/api").components["schemas"];

/** shared/viewer/uPlot.js, a script of its own. */
declare const uPlot: any;
