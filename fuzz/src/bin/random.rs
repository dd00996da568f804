//! Runs one fuzz target on its seeds and on random changes of them. It is ended by the first finding, and what ended it
//! can be any way a process ends: so the input under way is always in a file, which whoever started this reads then.

use std::{
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::Parser;
use oubliette_fuzz::{FuzzTarget, mutator::Mutator};
use rustix::process::{Resource, Rlimit, setrlimit};

/// How much processor time one input may take. Far more than any does, however busy the machine is.
const INPUT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long one input may take that waits for something.
const INPUT_WAIT: Duration = Duration::from_secs(600);
/// Memory this process may have.
const MAX_MEMORY: u64 = 2 << 30;

#[derive(Parser)]
#[command(about = "Runs one fuzz target on its seeds and on random changes of them.")]
struct RandomArgs {
    /// The target.
    target: String,
    /// Files, or directories of them, to begin with.
    inputs: Vec<PathBuf>,
    /// How long to go on with changed inputs, in seconds; 0 runs the given ones only.
    #[arg(long, default_value_t = 0)]
    seconds: u64,
    /// Where the input under way is kept.
    #[arg(long)]
    current: Option<PathBuf>,
    /// Makes the same inputs again.
    #[arg(long)]
    seed: Option<u64>,
}

/// When the input under way began, in milliseconds since the start; 0: none is under way.
static BEGAN: AtomicU64 = AtomicU64::new(0);
/// How much processor time this process had used then, in milliseconds.
static CPU_BEFORE: AtomicU64 = AtomicU64::new(0);

fn main() -> Result<()> {
    let args = RandomArgs::parse();
    let Some(target) = oubliette_fuzz::find(&args.target) else {
        let names: Vec<_> = oubliette_fuzz::TARGETS.iter().map(|t| t.name).collect();
        bail!("no target {}; there are {}", args.target, names.join(", "));
    };
    let limit = Rlimit {
        current: Some(MAX_MEMORY),
        maximum: Some(MAX_MEMORY),
    };
    setrlimit(Resource::Data, limit).context("cannot limit memory")?;
    // A panic on any thread is a finding.
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        print(panic);
        std::process::abort();
    }));
    let start = Instant::now();
    std::thread::spawn(move || watch(start));
    let mut run = Run {
        target,
        current: args.current.as_deref().map(File::create).transpose()?,
        start,
        count: 0,
    };
    let inputs = read_inputs(&args.inputs)?;
    for input in &inputs {
        run.once(input)?;
    }
    let seed = args.seed.unwrap_or_else(rand::random);
    let mut mutator = Mutator::new(seed, inputs);
    let end = start + Duration::from_secs(args.seconds);
    while Instant::now() < end {
        run.once(&mutator.next_input())?;
    }
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{}: {} executions in {seconds:.1} s, {:.0} a second, seed {seed}",
        target.name,
        run.count,
        run.count as f64 / seconds
    );
    Ok(())
}

struct Run {
    target: &'static FuzzTarget,
    current: Option<File>,
    start: Instant,
    count: u64,
}

impl Run {
    fn once(&mut self, input: &[u8]) -> Result<()> {
        if let Some(file) = &self.current {
            // The length first: what is behind it is left of a longer input.
            let framed = [&(input.len() as u64).to_le_bytes(), input].concat();
            file.write_all_at(&framed, 0)?;
        }
        let now = self.start.elapsed().as_millis() as u64;
        CPU_BEFORE.store(cpu_millis(), Ordering::Relaxed);
        BEGAN.store(now.max(1), Ordering::Release);
        (self.target.run)(input);
        BEGAN.store(0, Ordering::Release);
        self.count += 1;
        Ok(())
    }
}

/// Ends the process when an input takes too long.
fn watch(start: Instant) {
    loop {
        std::thread::sleep(INPUT_TIMEOUT / 10);
        let began = BEGAN.load(Ordering::Acquire);
        // Read before it is known whether the same input is still under way: a later one has used less.
        let used = cpu_millis().saturating_sub(CPU_BEFORE.load(Ordering::Relaxed));
        let took = (start.elapsed().as_millis() as u64).saturating_sub(began);
        if began == 0 || BEGAN.load(Ordering::Acquire) != began {
            continue;
        }
        if used > INPUT_TIMEOUT.as_millis() as u64 {
            eprintln!("an input takes longer than {} s", INPUT_TIMEOUT.as_secs());
            std::process::abort();
        }
        if took > INPUT_WAIT.as_millis() as u64 {
            eprintln!("an input waits longer than {} s", INPUT_WAIT.as_secs());
            std::process::abort();
        }
    }
}

/// Processor time this process has used, in milliseconds.
fn cpu_millis() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    u64::try_from(time.tv_sec * 1000 + time.tv_nsec / 1_000_000).unwrap_or(0)
}

fn read_inputs(paths: &[PathBuf]) -> Result<Vec<Vec<u8>>> {
    let mut files = Vec::new();
    for path in paths {
        match path.is_dir() {
            true => files.extend(list(path)?),
            false => files.push(path.clone()),
        }
    }
    files
        .iter()
        .map(|path| std::fs::read(path).with_context(|| format!("cannot read {}", path.display())))
        .collect()
}

/// The files of a directory, in the order of their names, so that a seed gives the same inputs everywhere.
fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.is_file())
        .collect();
    files.sort();
    Ok(files)
}
