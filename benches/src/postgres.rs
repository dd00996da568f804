//! A PostgreSQL of this run's own, started by `tests/postgres/serve.sh`.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
};

/// The script that starts it, beside this crate.
const SERVE_SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/postgres/serve.sh");
/// Settings that the script leaves out for the tests' sake: what is committed waits for the disk, as in production.
const SETTINGS: [&str; 3] = ["fsync=on", "full_page_writes=on", "shared_buffers=128MB"];

/// A running PostgreSQL on a socket of its own. It ends, and its files are removed, when this is dropped.
pub(crate) struct BenchPostgres {
    /// It serves until its standard input, which this holds, is closed.
    _serve: Child,
    socket_dir: PathBuf,
    /// Where its programs are.
    programs: PathBuf,
}

impl BenchPostgres {
    /// Starts one; an error that says what to install if PostgreSQL is missing.
    pub(crate) async fn start() -> Result<Self> {
        let mut serve = Command::new(SERVE_SCRIPT)
            .args(SETTINGS)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run {SERVE_SCRIPT}"))?;
        let mut line = String::new();
        BufReader::new(serve.stdout.take().context("no stdout")?)
            .read_line(&mut line)
            .await?;
        let line = line.trim();
        let Some(socket_dir) = line.strip_prefix("ready ").map(PathBuf::from) else {
            match line.strip_prefix("missing: ") {
                Some(what) => bail!("PostgreSQL is not installed: {what}"),
                None => bail!("PostgreSQL does not start: {line}"),
            }
        };
        let programs = programs_of(&socket_dir)?;
        Ok(Self {
            _serve: serve,
            socket_dir,
            programs,
        })
    }

    /// Makes a schema; returns its address.
    pub(crate) async fn create_schema(&self, schema: &str) -> Result<String> {
        self.execute(&format!("CREATE SCHEMA {schema}")).await?;
        let dir = self.socket_dir.display();
        Ok(format!(
            "postgres://oubliette@localhost/postgres?host={dir}&options[search_path]={schema}"
        ))
    }

    /// Runs statements.
    pub(crate) async fn execute(&self, sql: &str) -> Result<()> {
        let output = self
            .command("psql")
            .args(["-qX", "-v", "ON_ERROR_STOP=1", "-c", sql, "postgres"])
            .output()
            .await?;
        ensure!(
            output.status.success(),
            "{sql}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    }

    /// Transactions a second of PostgreSQL's own load generator, whose clients each run a script again and again on a
    /// connection of their own. A commit does not wait for the disk, as one that appends events does not.
    pub(crate) async fn pgbench_rate(&self, script: &Path, clients: usize, long: Duration) -> Result<f64> {
        let output = self
            .command("pgbench")
            .env("PGOPTIONS", "-c synchronous_commit=off")
            .args(["--no-vacuum", "--protocol=prepared", "--jobs=2"])
            .arg(format!("--client={clients}"))
            .arg(format!("--time={}", long.as_secs().max(1)))
            .arg("--file")
            .arg(script)
            .arg("postgres")
            .output()
            .await
            .context("cannot run pgbench")?;
        let text = String::from_utf8_lossy(&output.stdout);
        let rate = text
            .lines()
            .filter(|line| !line.contains("including connections"))
            .find_map(|line| line.strip_prefix("tps = ")?.split(' ').next()?.parse().ok());
        rate.with_context(|| {
            format!(
                "no rate from pgbench: {text}{}",
                String::from_utf8_lossy(&output.stderr)
            )
        })
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.programs.join(program));
        command
            .arg("-h")
            .arg(&self.socket_dir)
            .args(["-U", "oubliette"])
            .stdin(Stdio::null())
            .kill_on_drop(true);
        command
    }
}

/// The directory of the program that serves on this socket: distributions do not put all of them on the path.
fn programs_of(socket_dir: &Path) -> Result<PathBuf> {
    let file = socket_dir.join("data/postmaster.pid");
    let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let pid = text.lines().next().unwrap_or_default().trim();
    let program = std::fs::read_link(format!("/proc/{pid}/exe")).context("PostgreSQL has ended")?;
    Ok(program.parent().context("no directory")?.to_path_buf())
}
