//! The caller book with a real store and a real clock.
