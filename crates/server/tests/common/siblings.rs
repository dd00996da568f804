//! The other programs a running session needs: `oubliette-client` and `oubliette-agent`.

use std::{path::Path, process::Command, sync::OnceLock};

/// Builds the other programs into this one's directory, unless they are there.
pub fn build_sibling_programs() {
    static BUILT: OnceLock<()> = OnceLock::new();
    BUILT.get_or_init(|| {
        let beside = Path::new(env!("CARGO_BIN_EXE_oubliette")).parent().unwrap();
        if ["oubliette-client", "oubliette-agent"]
            .iter()
            .all(|name| beside.join(name).is_file())
        {
            return;
        }
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args([
            "build",
            "--quiet",
            "-p",
            "oubliette-client",
            "-p",
            "oubliette-agent",
        ]);
        assert!(cargo.status().unwrap().success());
    });
}
