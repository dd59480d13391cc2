// Slows down what events ask for.

/**
 * A function that has `call` done at most once in so many seconds, until the signal aborts. What is asked for meanwhile is
 * done once afterwards, so the last event counts too. Errors are dropped: the header says when the server is away.
 */
export function atMost(seconds, call, signal) {
  let busy = false;
  let wanted = false;
  return async () => {
    wanted = true;
    if (busy) return;
    busy = true;
    while (wanted && !signal.aborted) {
      wanted = false;
      await call().catch(() => {});
      await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
    }
    busy = false;
  };
}
