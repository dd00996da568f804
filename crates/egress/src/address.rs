//! Which addresses are nobody's business from inside a sandbox.
