//! The tool plane compared with other MCP proxies, all in front of the same echo server on stdio and called in the
//! same way.

mod proxies;

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::future::try_join_all;
use rustix::process::Signal;
use serde_json::json;

use super::BenchEffort;
use crate::{
    clock,
    home::{client_command, own_program},
    lines::JsonRpcLines,
    mcp::McpHttpClient,
    procs::{self, ProcessMemory},
    report::{BenchReport, ReportTable, format_number},
    stats::{TimingSamples, time_each},
};
use proxies::{McpProxy, RunningProxy};

/// How long a proxy may take to answer again after its upstream was killed.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(10);
const CONCURRENT_CALLS: u64 = 8;

/// The results of one proxy.
#[derive(Debug, Default)]
struct ProxyMeasurements {
    sequential: TimingSamples,
    concurrent_rate: f64,
    memory: ProcessMemory,
    first_answer: TimingSamples,
    after_kill: String,
}

pub(crate) async fn run(report: &mut BenchReport, effort: BenchEffort, install: bool) -> Result<()> {
    let proxies = proxies::installed_proxies(install).await?;
    let mut names: Vec<String> = proxies.iter().map(|proxy| proxy.name.clone()).collect();
    names.push("**Oubliette**, an agent's call through `oubliette-client`".into());
    let mut numbers: Vec<ProxyMeasurements> = names.iter().map(|_| ProxyMeasurements::default()).collect();

    for _ in 0..(effort.scale(50) / 10).max(1) {
        for (proxy, numbers) in proxies.iter().zip(&mut numbers) {
            let (running, _, took) = start_and_time_first_answer(proxy).await?;
            numbers.first_answer.push(took);
            running.stop().await?;
        }
    }

    let mut live = Vec::new();
    for proxy in &proxies {
        let (running, mcp, _) = start_and_time_first_answer(proxy).await?;
        live.push((proxy, running, mcp));
    }
    let (_, ours, _) = live
        .iter()
        .find(|(proxy, ..)| proxy.ours)
        .context("ours is missing")?;
    let call = json!({"name": "echo_echo", "arguments": {"text": "hello"}});
    let socket = ours.relay_socket().await?;
    // An agent starts only the client; the server is already running.
    if let Some(last) = numbers.last_mut() {
        for _ in 0..(effort.scale(50) / 10).max(1) {
            let begun = clock::now();
            let mut inside = JsonRpcLines::spawn_mcp(&mut client_command(&socket, None)?).await?;
            inside.call("tools/call", &call).await?;
            last.first_answer.push(clock::since(begun));
        }
    }
    let mut inside = JsonRpcLines::spawn_mcp(&mut client_command(&socket, None)?).await?;
    for round in 0..=effort.scale(10) {
        for ((proxy, _, mcp), numbers) in live.iter_mut().zip(&mut numbers) {
            let times = time_each(500, async || mcp.call(&proxy.tool, &proxy.arguments).await).await?;
            if round > 0 {
                numbers.sequential.extend(times);
            }
        }
        let times = time_each(500, async || inside.call("tools/call", &call).await).await?;
        if let (true, Some(last)) = (round > 0, numbers.last_mut()) {
            last.sequential.extend(times);
        }
    }
    let (rounds, long) = (3, Duration::from_millis(effort.scale(2000) as u64));
    for _ in 0..rounds {
        for ((proxy, _, mcp), numbers) in live.iter().zip(&mut numbers) {
            numbers.concurrent_rate += rate_of_eight(proxy, mcp, long).await? / f64::from(rounds);
        }
        let begun = Instant::now();
        let done = inside
            .flood("tools/call", &call, CONCURRENT_CALLS as usize, || {
                begun.elapsed() < long
            })
            .await?;
        if let Some(last) = numbers.last_mut() {
            last.concurrent_rate += done as f64 / begun.elapsed().as_secs_f64() / f64::from(rounds);
        }
    }
    for ((proxy, running, mcp), numbers) in live.iter_mut().zip(&mut numbers) {
        numbers.memory = procs::total_memory(&running.processes(&proxy.tag)?);
        numbers.after_kill = time_recovery(proxy, mcp).await?;
    }
    if let (Some(pid), Some((proxy, running, _))) = (inside.pid(), live.iter().find(|(f, ..)| f.ours)) {
        let mut processes = running.processes(&proxy.tag)?;
        processes.push(pid);
        let killed = time_recovery_inside(proxy, &mut inside, &call).await?;
        if let Some(last) = numbers.last_mut() {
            last.memory = procs::total_memory(&processes);
            last.after_kill = killed;
        }
    }
    for (_, running, _) in live {
        running.stop().await?;
    }
    report.grids.push(measurements_table(&names, &numbers));
    Ok(())
}

fn measurements_table(names: &[String], numbers: &[ProxyMeasurements]) -> ReportTable {
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
            format_number(n.sequential.p50(), "ms"),
            format_number(n.sequential.p99(), "ms"),
            format_number(n.sequential.rate_per_second(), ""),
            format_number(n.concurrent_rate, ""),
            format_number(n.memory.pss / 1024.0, "MiB"),
            format_number(n.first_answer.p50(), "ms"),
            n.after_kill.clone(),
        ]
    });
    let values = names.iter().zip(numbers).map(|(name, n)| {
        json!({"name": name, "p50_ms": n.sequential.p50(), "p99_ms": n.sequential.p99(), "calls_per_s_1": n.sequential.rate_per_second(),
               "calls_per_s_8": n.concurrent_rate, "pss_mib": n.memory.pss / 1024.0, "rss_mib": n.memory.rss / 1024.0,
               "first_answer_ms": n.first_answer.p50(), "killed": n.after_kill})
    });
    ReportTable {
        title: "In front of the same bare Rust echo server on stdio:".into(),
        head: head.map(str::to_owned).into(),
        rows: rows.collect(),
        values: values.collect(),
    }
}

/// Starts a proxy and calls it until the first call succeeds; returns the time that took.
async fn start_and_time_first_answer(proxy: &McpProxy) -> Result<(RunningProxy, McpHttpClient, Duration)> {
    let begun = clock::now();
    let running = proxy.start().await?;
    let asked = async {
        loop {
            if let Ok(mut mcp) = proxy.connect_mcp(&running).await
                && mcp.call(&proxy.tool, &proxy.arguments).await.is_ok()
            {
                return (mcp, clock::since(begun));
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let answered = tokio::time::timeout(Duration::from_secs(30), asked).await;
    let (mcp, took) = answered.with_context(|| format!("{} does not answer", proxy.name))?;
    Ok((running, mcp, took))
}

/// Calls per second with eight in flight, on one MCP session.
async fn rate_of_eight(proxy: &McpProxy, mcp: &McpHttpClient, long: Duration) -> Result<f64> {
    let begun = Instant::now();
    let callers = (1..=CONCURRENT_CALLS).map(async |n| {
        let mut mcp = mcp
            .with_new_connection(n * 1_000_000_000 + u64::from(begun.elapsed().subsec_nanos()))
            .await?;
        let mut done = 0_u32;
        while begun.elapsed() < long {
            mcp.call(&proxy.tool, &proxy.arguments).await?;
            done += 1;
        }
        anyhow::Ok(done)
    });
    let done: u32 = try_join_all(callers).await?.into_iter().sum();
    Ok(f64::from(done) / begun.elapsed().as_secs_f64())
}

fn kill_echo_server(proxy: &McpProxy) -> Result<()> {
    for pid in procs::pids_with_arguments(&[&own_program()?, "as-echo", &proxy.tag]) {
        procs::send_signal(pid, Signal::KILL);
    }
    Ok(())
}

/// Kills the echo server and calls until the proxy answers again; describes how it recovered.
async fn time_recovery(proxy: &McpProxy, mcp: &mut McpHttpClient) -> Result<String> {
    kill_echo_server(proxy)?;
    let begun = clock::now();
    let mut next = 900_000_000;
    while clock::since(begun) < RECOVERY_TIMEOUT {
        next += 1;
        let again = async {
            let mut mcp = mcp.with_new_connection(next).await?;
            mcp.call(&proxy.tool, &proxy.arguments).await
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
        let mut mcp = proxy.reconnect_mcp().await?;
        mcp.call(&proxy.tool, &proxy.arguments).await
    };
    Ok(match tokio::time::timeout(Duration::from_secs(5), anew).await {
        Ok(Ok(())) => "its session is dead; a new one works".into(),
        _ => "dead until restarted".into(),
    })
}

async fn time_recovery_inside(
    proxy: &McpProxy,
    inside: &mut JsonRpcLines,
    call: &serde_json::Value,
) -> Result<String> {
    kill_echo_server(proxy)?;
    let begun = clock::now();
    while clock::since(begun) < RECOVERY_TIMEOUT {
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
