//! `[egress] allow`, the exceptions.
