/**
 * Questions that may overtake each other. Each call begins one and gives back whether it is still the newest: an
 * answer that is not shows nothing, however late it comes.
 */
export function newest(): () => () => boolean {
  let last = 0;
  return () => {
    const mine = ++last;
    return () => mine === last;
  };
}
