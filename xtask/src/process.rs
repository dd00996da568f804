//! Running programs, and recording how each step ended.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
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

/// The path of a program found on PATH.
pub(crate) fn find_on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|dir| dir.join(program))
        .find(|file| file.is_file())
}

/// Runs named steps and records how long each took and how it ended.
#[derive(Default)]
pub(crate) struct StepRunner {
    only: Option<String>,
    done: Vec<(String, Duration, Option<String>)>,
}

impl StepRunner {
    pub(crate) fn new(only: Option<&str>) -> Self {
        Self {
            only: only.map(str::to_owned),
            done: Vec::new(),
        }
    }

    /// Runs one step. A failure does not stop the run, so that one run shows everything that is wrong.
    pub(crate) fn step(&mut self, name: &str, work: impl FnOnce() -> Result<()>) {
        if self.only.as_deref().is_some_and(|only| !name.contains(only)) {
            return;
        }
        println!("\n== {name}");
        let start = Instant::now();
        let failure = work().err().map(|e| format!("{e:#}"));
        if let Some(why) = &failure {
            eprintln!("== {name} failed: {why}");
        }
        self.done.push((name.to_owned(), start.elapsed(), failure));
    }

    /// Prints a summary; an error if any step failed.
    pub(crate) fn finish(self) -> Result<()> {
        println!("\n== summary");
        for (name, took, failure) in &self.done {
            let mark = if failure.is_none() { "ok    " } else { "FAILED" };
            println!("{mark} {:>7.1} s  {name}", took.as_secs_f64());
        }
        let failed: Vec<_> = self
            .done
            .iter()
            .filter(|d| d.2.is_some())
            .map(|d| d.0.as_str())
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
