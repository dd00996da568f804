//! A PostgreSQL of the tests' own, shared by all tests of a run (`tests/postgres/serve.sh`).

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::setup;

/// The server that the tests use, which ends when this is dropped.
pub(crate) struct TestPostgres {
    child: Child,
    /// The directory of its socket.
    pub(crate) socket_dir: String,
}

impl TestPostgres {
    /// Installs PostgreSQL if it is missing and the system allows it, and starts one.
    pub(crate) fn start(root: &Path) -> Result<Self> {
        let script = root.join("tests/postgres/serve.sh");
        match Self::serve(&script) {
            Ok(started) => Ok(started),
            Err(_) => {
                setup::install_postgres()?;
                Self::serve(&script)
            }
        }
    }

    fn serve(script: &Path) -> Result<Self> {
        let mut child = Command::new(script)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run {}", script.display()))?;
        let mut line = String::new();
        if let Some(output) = child.stdout.take() {
            BufReader::new(output).read_line(&mut line)?;
        }
        match line.trim().strip_prefix("ready ") {
            Some(socket_dir) => Ok(Self {
                socket_dir: socket_dir.to_owned(),
                child,
            }),
            None => {
                child.wait()?;
                bail!("{}", line.trim())
            }
        }
    }
}

impl Drop for TestPostgres {
    fn drop(&mut self) {
        // It ends, and removes everything, when its input is closed.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}
