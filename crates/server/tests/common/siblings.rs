//! The programs a running session needs beside ours.

use std::{path::Path, process::Command, sync::OnceLock};

/// Our other programs, beside this one; built if nothing else has.
pub fn siblings() {
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
            "oubliette-bridge",
            "-p",
            "oubliette-agent",
        ]);
        assert!(cargo.status().unwrap().success());
    });
}
