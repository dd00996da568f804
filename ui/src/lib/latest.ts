/**
 * Guards against answers that arrive out of order. Each call starts a request and returns a function that says whether it
 * is still the latest one; an answer to an older request must not be shown.
 */
export function onlyLatest(): () => () => boolean {
  let last = 0;
  return () => {
    const mine = ++last;
    return () => mine === last;
  };
}
