//! The tool plane beside other MCP proxies, all in front of the same echo server on stdio, asked the same way.

mod fronts;

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::future::try_join_all;
use rustix::process::Signal;
use serde_json::json;

use super::Effort;
use crate::{
    clock,
    home::{client, own},
    lines::Lines,
    mcp::Mcp,
    procs::{self, Memory},
    report::{Grid, Report, shown},
    stats::{Times, timed},
};
use fronts::{Front, Running};

/// How long a front may take to come back before it counts as dead.
const BACK: Duration = Duration::from_secs(10);
const AT_ONCE: u64 = 8;

/// What is told of each.
#[derive(Debug, Default)]
struct Numbers {
    one: Times,
    eight: f64,
    memory: Memory,
    first: Times,
    killed: String,
}

pub(crate) async fn run(report: &mut Report, effort: Effort, install: bool) -> Result<()> {
    let fronts = fronts::all(install).await?;
    let mut names: Vec<String> = fronts.iter().map(|front| front.name.clone()).collect();
    names.push("**Oubliette**, an agent's call through `oubliette-client`".into());
    let mut numbers: Vec<Numbers> = names.iter().map(|_| Numbers::default()).collect();

    for _ in 0..(effort.of(50) / 10).max(1) {
        for (front, numbers) in fronts.iter().zip(&mut numbers) {
            let (running, _, took) = first_answer(front).await?;
            numbers.first.push(took);
            running.stop().await?;
        }
    }

    let mut live = Vec::new();
    for front in &fronts {
        let (running, mcp, _) = first_answer(front).await?;
        live.push((front, running, mcp));
    }
    let (_, ours, _) = live
        .iter()
        .find(|(front, ..)| front.ours)
        .context("ours is missing")?;
    let call = json!({"name": "echo_echo", "arguments": {"text": "hello"}});
    let socket = ours.socket().await?;
    // What an agent starts is the client; the server it speaks to runs already.
    if let Some(last) = numbers.last_mut() {
        for _ in 0..(effort.of(50) / 10).max(1) {
            let begun = clock::now();
            let mut inside = Lines::mcp(&mut client(&socket, None)?).await?;
            inside.call("tools/call", &call).await?;
            last.first.push(clock::since(begun));
        }
    }
    let mut inside = Lines::mcp(&mut client(&socket, None)?).await?;
    for round in 0..=effort.of(10) {
        for ((front, _, mcp), numbers) in live.iter_mut().zip(&mut numbers) {
            let times = timed(500, async || mcp.call(&front.tool, &front.arguments).await).await?;
            if round > 0 {
                numbers.one.extend(times);
            }
        }
        let times = timed(500, async || inside.call("tools/call", &call).await).await?;
        if let (true, Some(last)) = (round > 0, numbers.last_mut()) {
            last.one.extend(times);
        }
    }
    let (rounds, long) = (3, Duration::from_millis(effort.of(2000) as u64));
    for _ in 0..rounds {
        for ((front, _, mcp), numbers) in live.iter().zip(&mut numbers) {
            numbers.eight += eight(front, mcp, long).await? / f64::from(rounds);
        }
        let begun = Instant::now();
        let done = inside
            .flood("tools/call", &call, AT_ONCE as usize, || begun.elapsed() < long)
            .await?;
        if let Some(last) = numbers.last_mut() {
            last.eight += done as f64 / begun.elapsed().as_secs_f64() / f64::from(rounds);
        }
    }
    for ((front, running, mcp), numbers) in live.iter_mut().zip(&mut numbers) {
        numbers.memory = procs::memory_of(&running.processes(&front.tag)?);
        numbers.killed = after_kill(front, mcp).await?;
    }
    if let (Some(pid), Some((front, running, _))) = (inside.pid(), live.iter().find(|(f, ..)| f.ours)) {
        let mut processes = running.processes(&front.tag)?;
        processes.push(pid);
        let killed = killed_inside(front, &mut inside, &call).await?;
        if let Some(last) = numbers.last_mut() {
            last.memory = procs::memory_of(&processes);
            last.killed = killed;
        }
    }
    for (_, running, _) in live {
        running.stop().await?;
    }
    report.grids.push(table(&names, &numbers));
    Ok(())
}

fn table(names: &[String], numbers: &[Numbers]) -> Grid {
    let head = [
        "",
        "p50",
        "p99",
        "calls/s, 1",
        "calls/s, 8",
        "memory",
        "spawn → first answer",
        "upstream killed",
    ];
    let rows = names.iter().zip(numbers).map(|(name, n)| {
        vec![
            name.clone(),
            shown(n.one.p50(), "ms"),
            shown(n.one.p99(), "ms"),
            shown(n.one.rate(), ""),
            shown(n.eight, ""),
            shown(n.memory.pss / 1024.0, "MiB"),
            shown(n.first.p50(), "ms"),
            n.killed.clone(),
        ]
    });
    let values = names.iter().zip(numbers).map(|(name, n)| {
        json!({"name": name, "p50_ms": n.one.p50(), "p99_ms": n.one.p99(), "calls_per_s_1": n.one.rate(),
               "calls_per_s_8": n.eight, "pss_mib": n.memory.pss / 1024.0, "rss_mib": n.memory.rss / 1024.0,
               "first_answer_ms": n.first.p50(), "killed": n.killed})
    });
    Grid {
        title: "In front of the same bare Rust echo server on stdio:".into(),
        head: head.map(str::to_owned).into(),
        rows: rows.collect(),
        values: values.collect(),
    }
}

/// Starts a front and asks until the first call is answered.
async fn first_answer(front: &Front) -> Result<(Running, Mcp, Duration)> {
    let begun = clock::now();
    let running = front.start().await?;
    let asked = async {
        loop {
            if let Ok(mut mcp) = front.open(&running).await
                && mcp.call(&front.tool, &front.arguments).await.is_ok()
            {
                return (mcp, clock::since(begun));
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let answered = tokio::time::timeout(Duration::from_secs(30), asked).await;
    let (mcp, took) = answered.with_context(|| format!("{} does not answer", front.name))?;
    Ok((running, mcp, took))
}

/// Calls a second with eight under way, on one MCP session.
async fn eight(front: &Front, mcp: &Mcp, long: Duration) -> Result<f64> {
    let begun = Instant::now();
    let callers = (1..=AT_ONCE).map(async |n| {
        let mut mcp = mcp
            .another(n * 1_000_000_000 + u64::from(begun.elapsed().subsec_nanos()))
            .await?;
        let mut done = 0_u32;
        while begun.elapsed() < long {
            mcp.call(&front.tool, &front.arguments).await?;
            done += 1;
        }
        anyhow::Ok(done)
    });
    let done: u32 = try_join_all(callers).await?.into_iter().sum();
    Ok(f64::from(done) / begun.elapsed().as_secs_f64())
}

fn kill(front: &Front) -> Result<()> {
    for pid in procs::with_arguments(&[&own()?, "as-echo", &front.tag]) {
        procs::kill(pid, Signal::KILL);
    }
    Ok(())
}

/// Kills the echo server and asks until it answers again.
async fn after_kill(front: &Front, mcp: &mut Mcp) -> Result<String> {
    kill(front)?;
    let begun = clock::now();
    let mut next = 900_000_000;
    while clock::since(begun) < BACK {
        next += 1;
        let again = async {
            let mut mcp = mcp.another(next).await?;
            mcp.call(&front.tool, &front.arguments).await
        };
        if let Ok(Ok(())) = tokio::time::timeout(Duration::from_secs(2), again).await {
            return Ok(format!(
                "back after {:.0} ms, same session",
                clock::since(begun).as_secs_f64() * 1000.0
            ));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let anew = async {
        let mut mcp = front.reopen().await?;
        mcp.call(&front.tool, &front.arguments).await
    };
    Ok(match tokio::time::timeout(Duration::from_secs(5), anew).await {
        Ok(Ok(())) => "its session is dead; a new one works".into(),
        _ => "dead until restarted".into(),
    })
}

async fn killed_inside(front: &Front, inside: &mut Lines, call: &serde_json::Value) -> Result<String> {
    kill(front)?;
    let begun = clock::now();
    while clock::since(begun) < BACK {
        if let Ok(Ok(())) =
            tokio::time::timeout(Duration::from_secs(2), inside.call("tools/call", call)).await
        {
            return Ok(format!(
                "back after {:.0} ms, same session",
                clock::since(begun).as_secs_f64() * 1000.0
            ));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok("dead".into())
}
