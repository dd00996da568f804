//! `oubliette-client` as an agent and the server see it.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

#[path = "shared/lent.rs"]
mod lent;
mod rig;

mod by_the_client {
    const LENT: bool = false;
    include!("shared/cases.rs");
}

mod over_lent_streams {
    const LENT: bool = true;
    include!("shared/cases.rs");
}
