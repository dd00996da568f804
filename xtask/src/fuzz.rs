//! `cargo xtask fuzz`: runs the fuzz targets of `fuzz/`, each in a process of its own.
//!
//! Both engines work with the stable compiler. libFuzzer is guided by coverage, which LLVM's instrumentation gives it; it
//! needs a C++ compiler, and everything is built again for it, into target/fuzz. Random changes of the seeds need nothing,
//! and use the ordinary build.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use crate::process::{find_on_path, run, run_with};

/// What makes the inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FuzzEngine {
    /// Guided by coverage.
    Libfuzzer,
    /// Random changes of the seeds.
    Random,
}

/// Options of a run.
#[derive(Debug, Clone)]
pub(crate) struct FuzzOptions {
    /// How long each target runs.
    pub seconds: u64,
    /// The targets; all if empty.
    pub targets: Vec<String>,
    /// The engine; none: libFuzzer where there is a C++ compiler.
    pub engine: Option<FuzzEngine>,
}

/// LLVM's coverage instrumentation as libFuzzer reads it, and the checks of a debug build. The products' own code is as
/// it is shipped: `cfg(fuzzing)`, which some crates look at, is not set.
const INSTRUMENTATION: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Cllvm-args=-sanitizer-coverage-stack-depth \
    -Ccodegen-units=1";

/// What came of one target.
struct TargetReport {
    name: String,
    seconds: f64,
    executions: u64,
    finding: Option<PathBuf>,
}

/// Builds and runs the targets and prints what came of each; an error if there is a finding.
pub(crate) fn run_targets(root: &Path, options: &FuzzOptions) -> Result<()> {
    let all = target_names(root)?;
    if let Some(unknown) = options.targets.iter().find(|name| !all.contains(name)) {
        bail!("there is no target {unknown}; there are {}", all.join(", "));
    }
    let engine = options.engine.unwrap_or_else(default_engine);
    let program = match engine {
        FuzzEngine::Libfuzzer => build_libfuzzer(root)?,
        FuzzEngine::Random => build_random(root)?,
    };
    let artifacts = root.join("fuzz/artifacts");
    fs::create_dir_all(&artifacts)?;
    let mut reports = Vec::new();
    for name in all
        .iter()
        .filter(|name| options.targets.is_empty() || options.targets.contains(name))
    {
        let report = match engine {
            FuzzEngine::Libfuzzer => run_libfuzzer(root, &program, name, options.seconds, &artifacts)?,
            FuzzEngine::Random => run_random(root, &program, name, options.seconds, &artifacts)?,
        };
        println!("{}", report.line());
        reports.push(report);
    }
    let found: Vec<_> = reports.iter().filter(|report| report.finding.is_some()).collect();
    let executions: u64 = reports.iter().map(|report| report.executions).sum();
    println!(
        "{} targets, {executions} executions by {}, {} findings",
        reports.len(),
        engine.describe(),
        found.len()
    );
    for report in &found {
        if let Some(input) = &report.finding {
            println!(
                "repeat: cargo xtask fuzz --target {} --input {}",
                report.name,
                input.display()
            );
        }
    }
    match found.is_empty() {
        true => Ok(()),
        false => bail!("{} targets have findings", found.len()),
    }
}

/// Runs one target on one input, such as a finding.
pub(crate) fn run_input(root: &Path, target: &str, input: &Path) -> Result<()> {
    let program = build_random(root)?.to_string_lossy().into_owned();
    run(root, &program, &[target, &input.to_string_lossy()])
}

impl FuzzEngine {
    fn describe(self) -> &'static str {
        match self {
            FuzzEngine::Libfuzzer => "libFuzzer",
            FuzzEngine::Random => "random changes",
        }
    }
}

impl TargetReport {
    fn line(&self) -> String {
        let rate = self.executions as f64 / self.seconds.max(0.1);
        let state = if self.finding.is_some() { "FOUND" } else { "ok   " };
        format!(
            "{state} {:>7.1} s {:>10} executions {rate:>8.0} a second  {}",
            self.seconds, self.executions, self.name
        )
    }
}

fn default_engine() -> FuzzEngine {
    match ["c++", "g++", "clang++"]
        .iter()
        .any(|name| find_on_path(name).is_some())
    {
        true => FuzzEngine::Libfuzzer,
        false => FuzzEngine::Random,
    }
}

/// The targets: each has a directory of seeds, which a test of the crate compares with its list.
fn target_names(root: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(root.join("fuzz/seeds")).context("fuzz/seeds is missing")?;
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    Ok(names)
}

fn build_random(root: &Path) -> Result<PathBuf> {
    // With the whole workspace, as for the tests: a package alone would have its dependencies built again.
    run(root, "cargo", &["build", "--workspace", "--bins", "--quiet"])?;
    Ok(root.join("target/debug/fuzz-random"))
}

fn build_libfuzzer(root: &Path) -> Result<PathBuf> {
    let version = Command::new("rustc")
        .args(["-vV"])
        .output()
        .context("cannot run rustc")?;
    let version = String::from_utf8_lossy(&version.stdout).into_owned();
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    let host = host.context("rustc -vV names no host")?;
    let folder = root.join("target/fuzz");
    println!("building with coverage instrumentation into {}", folder.display());
    let args = [
        "build",
        "--quiet",
        "-p",
        "oubliette-fuzz",
        "--bin",
        "fuzz-libfuzzer",
        "--features",
        "libfuzzer",
        "--profile",
        "fuzz",
        // So that build scripts and macros, which run here, are not instrumented.
        "--target",
        host,
    ];
    let env = [
        ("RUSTFLAGS", INSTRUMENTATION.as_ref()),
        ("CARGO_TARGET_DIR", folder.as_os_str()),
    ];
    run_with(root, "cargo", &args, &env)?;
    Ok(folder.join(host).join("fuzz/fuzz-libfuzzer"))
}

fn run_libfuzzer(
    root: &Path,
    program: &Path,
    name: &str,
    seconds: u64,
    artifacts: &Path,
) -> Result<TargetReport> {
    let corpus = root.join("fuzz/corpus").join(name);
    fs::create_dir_all(&corpus)?;
    let begun = Instant::now();
    let output = Command::new(program)
        .arg(&corpus)
        .arg(root.join("fuzz/seeds").join(name))
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-artifact_prefix={}/{name}-", artifacts.display()))
        .args([
            "-timeout=10",
            "-rss_limit_mb=2048",
            "-max_len=65536",
            "-print_final_stats=1",
        ])
        .env("OUBLIETTE_FUZZ_TARGET", name)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    let text = String::from_utf8_lossy(&output.stderr);
    let executions = text.lines().find_map(|line| {
        line.strip_prefix("stat::number_of_executed_units:")?
            .trim()
            .parse()
            .ok()
    });
    let saved = text
        .lines()
        .find_map(|line| line.split_once("Test unit written to "));
    let finding = match output.status.success() {
        true => None,
        false => {
            print_end(&text, output.status);
            // Killed before it could save anything: its last words are all there is.
            let none = || artifacts.join(format!("{name}-not-saved"));
            Some(saved.map_or_else(none, |(_, path)| PathBuf::from(path.trim())))
        }
    };
    Ok(TargetReport {
        name: name.to_owned(),
        seconds: begun.elapsed().as_secs_f64(),
        executions: executions.unwrap_or(0),
        finding,
    })
}

fn run_random(
    root: &Path,
    program: &Path,
    name: &str,
    seconds: u64,
    artifacts: &Path,
) -> Result<TargetReport> {
    let current = artifacts.join(format!("{name}.current"));
    let begun = Instant::now();
    let output = Command::new(program)
        .args([name, "--seconds", &seconds.to_string(), "--current"])
        .arg(&current)
        .arg(root.join("fuzz/seeds").join(name))
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    let said = String::from_utf8_lossy(&output.stdout);
    let executions = said.split_whitespace().nth(1).and_then(|word| word.parse().ok());
    let finding = match output.status.success() {
        true => None,
        false => {
            print_end(&String::from_utf8_lossy(&output.stderr), output.status);
            Some(save_current(&current, artifacts, name)?)
        }
    };
    fs::remove_file(&current)?;
    Ok(TargetReport {
        name: name.to_owned(),
        seconds: begun.elapsed().as_secs_f64(),
        executions: executions.unwrap_or(0),
        finding,
    })
}

/// Keeps the input that was under way: its length in eight bytes, then itself.
fn save_current(current: &Path, artifacts: &Path, name: &str) -> Result<PathBuf> {
    let bytes = fs::read(current)?;
    let (length, rest) = bytes.split_first_chunk().context("no input was under way")?;
    let input = &rest[..rest.len().min(u64::from_le_bytes(*length) as usize)];
    let saved = artifacts.join(format!("{name}-random-{}", std::process::id()));
    fs::write(&saved, input)?;
    Ok(saved)
}

/// Shows how a process that found something ended.
fn print_end(text: &str, status: ExitStatus) {
    let lines: Vec<&str> = text.lines().collect();
    for line in &lines[lines.len().saturating_sub(30)..] {
        eprintln!("    {line}");
    }
    eprintln!("    ended with {status}");
}
