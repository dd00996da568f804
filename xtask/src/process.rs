//! Running programs, and recording how each step ended.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

/// Runs a program in `dir` with its output shown; an error if it fails.
pub(crate) fn run<S: AsRef<OsStr>>(dir: &Path, program: &str, args: &[S]) -> Result<()> {
    run_with(dir, program, args, &[])
}

/// Runs a program like [`run`], with additional environment variables.
pub(crate) fn run_with<S: AsRef<OsStr>>(
    dir: &Path,
    program: &str,
    args: &[S],
    env: &[(&str, &OsStr)],
) -> Result<()> {
    let mut command = Command::new(program);
    command.args(args).current_dir(dir).stdin(Stdio::null());
    command.envs(env.iter().map(|(name, value)| (name, value)));
    let status = command
        .status()
        .with_context(|| format!("cannot run {program}"))?;
    if !status.success() {
        let args: Vec<_> = args.iter().map(|a| a.as_ref().to_string_lossy()).collect();
        bail!("`{program} {}` failed ({status})", args.join(" "));
    }
    Ok(())
}

/// Removes a folder that was built here, if it is there.
#[allow(
    clippy::disallowed_methods,
    reason = "folders under target/ and docs/ that this program made, not trees of an agent"
)]
pub(crate) fn remove_built_folder(dir: &Path) -> Result<()> {
    match std::fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove the old {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// The path of a program found on PATH.
pub(crate) fn find_on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|dir| dir.join(program))
        .find(|file| file.is_file())
}

/// How one step ended.
pub(crate) struct StepOutcome {
    name: String,
    took: Duration,
    failure: Option<String>,
}

/// Runs named steps and records how long each took and how it ended.
#[derive(Default)]
pub(crate) struct StepRunner {
    only: Option<String>,
    done: Vec<StepOutcome>,
    notes: Vec<String>,
}

impl StepRunner {
    pub(crate) fn new(only: Option<&str>) -> Self {
        Self {
            only: only.map(str::to_owned),
            done: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// Adds a line to the summary, such as what could not be tested here.
    pub(crate) fn note(&mut self, text: String) {
        self.notes.push(text);
    }

    /// Runs one step. A failure does not stop the run, so that one run shows everything that is wrong.
    pub(crate) fn step(&mut self, name: &str, work: impl FnOnce() -> Result<()>) {
        if self.is_wanted(name) {
            self.done.push(run_step(name, work));
        }
    }

    /// Begins a step on a thread of its own, for work that mostly waits, such as for a download.
    pub(crate) fn begin(
        &self,
        name: &'static str,
        work: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Option<JoinHandle<StepOutcome>> {
        self.is_wanted(name)
            .then(|| std::thread::spawn(move || run_step(name, work)))
    }

    /// Waits for a step that was begun.
    pub(crate) fn end(&mut self, begun: Option<JoinHandle<StepOutcome>>) {
        match begun.map(JoinHandle::join) {
            Some(Ok(outcome)) => self.done.push(outcome),
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => {}
        }
    }

    /// Whether a step of this name runs.
    pub(crate) fn is_wanted(&self, name: &str) -> bool {
        self.only.as_deref().is_none_or(|only| name.contains(only))
    }

    /// Prints a summary; an error if any step failed.
    pub(crate) fn finish(self) -> Result<()> {
        println!("\n== summary");
        for StepOutcome { name, took, failure } in &self.done {
            let mark = if failure.is_none() { "ok    " } else { "FAILED" };
            println!("{mark} {:>7.1} s  {name}", took.as_secs_f64());
        }
        for note in &self.notes {
            println!("note             {note}");
        }
        let failed: Vec<_> = self
            .done
            .iter()
            .filter(|step| step.failure.is_some())
            .map(|step| step.name.as_str())
            .collect();
        match failed.is_empty() {
            true => Ok(()),
            false => bail!(
                "{} of {} steps failed: {}",
                failed.len(),
                self.done.len(),
                failed.join(", ")
            ),
        }
    }
}

fn run_step(name: &str, work: impl FnOnce() -> Result<()>) -> StepOutcome {
    println!("\n== {name}");
    let start = Instant::now();
    let failure = work().err().map(|e| format!("{e:#}"));
    let took = start.elapsed();
    match &failure {
        Some(why) => eprintln!("== {name} failed: {why}"),
        None => println!("== {name}: ok after {:.0} s", took.as_secs_f64()),
    }
    StepOutcome {
        name: name.to_owned(),
        took,
        failure,
    }
}
