//! The files of an installation below its prefix: programs, man pages, completions, unit, documents.

use std::{
    ffi::OsStr,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use super::{Dist, DistProfile};
use crate::process::{find_on_path, run};

/// The three programs. They belong together: the server starts the other two.
pub(super) const PROGRAMS: [&str; 3] = ["oubliette", "oubliette-client", "oubliette-agent"];
const DOCUMENTS: [&str; 6] = [
    "README.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "LICENSE",
    "LICENSE-MIT",
    "LICENSE-APACHE",
];
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "share/bash-completion/completions/oubliette"),
    ("zsh", "share/zsh/site-functions/_oubliette"),
    ("fish", "share/fish/vendor_completions.d/oubliette.fish"),
];

/// Makes the tree; returns its folder, whose content goes to `/usr` or `/usr/local`.
pub(super) fn make(dist: &Dist, bill: &Path) -> Result<PathBuf> {
    let tree = dist.stage.join("tree");
    for program in PROGRAMS {
        put(
            &dist.programs().join(program),
            &tree.join("bin").join(program),
            0o755,
        )?;
    }
    if dist.profile == DistProfile::Dev && find_on_path("strip").is_some() {
        // Release programs are made without it; of debug programs it is three quarters.
        let programs = PROGRAMS.map(|program| tree.join("bin").join(program));
        let mut args = vec![OsStr::new("--strip-debug")];
        args.extend(programs.iter().map(|program| program.as_os_str()));
        run(&dist.root, "strip", &args)?;
    }
    for (shell, path) in COMPLETIONS {
        let script = output_of(&tree.join("bin/oubliette"), &["completions", shell])?;
        put_text(&script, &tree.join(path))?;
    }
    write_man_pages(dist, &tree.join("share/man/man1"))?;
    let unit = "lib/systemd/system/oubliette.service";
    put(
        &dist.root.join("deploy/systemd/oubliette.service"),
        &tree.join(unit),
        0o644,
    )?;
    let documents = tree.join("share/doc/oubliette");
    for document in DOCUMENTS {
        put(&dist.root.join(document), &documents.join(document), 0o644)?;
    }
    for example in [
        "prometheus/rules.yml",
        "prometheus/scrape.yml",
        "grafana/oubliette.json",
    ] {
        put(
            &dist.root.join("deploy").join(example),
            &documents.join("examples").join(example),
            0o644,
        )?;
    }
    for schema in ["agent.json", "tool.json", "config.json"] {
        put(
            &dist.root.join("docs/src/schemas").join(schema),
            &tree.join("share/oubliette/schemas").join(schema),
            0o644,
        )?;
    }
    put(bill, &documents.join("sbom.cdx.json"), 0o644)?;
    Ok(tree)
}

/// Man pages: of `oubliette` and each command from the code, of the other two from what they say with `--help`.
fn write_man_pages(dist: &Dist, dir: &Path) -> Result<()> {
    fs::create_dir_all(dir)?;
    let dir_text = dir.to_string_lossy().into_owned();
    match dist.profile {
        // Built with the programs.
        DistProfile::Dev => {
            let reference = dist
                .programs()
                .join("examples/reference")
                .to_string_lossy()
                .into_owned();
            run(&dist.root, &reference, &["man", &dir_text])?;
        }
        // The one that wrote the book's reference: an optimised one would be compiled for this alone.
        DistProfile::Release => {
            let cargo = [
                "run",
                "--quiet",
                "-p",
                "oubliette",
                "--example",
                "reference",
                "--",
            ];
            run(&dist.root, "cargo", &[&cargo[..], &["man", &dir_text]].concat())?;
        }
    }
    for program in ["oubliette-client", "oubliette-agent"] {
        let help = output_of(&dist.programs().join(program), &["--help"])?;
        put_text(&man_page(program, &help), &dir.join(format!("{program}.1")))?;
    }
    for page in fs::read_dir(dir)? {
        fs::set_permissions(page?.path(), fs::Permissions::from_mode(0o644))?;
    }
    Ok(())
}

/// A man page that shows a program's help text as it is.
fn man_page(program: &str, help: &str) -> String {
    let summary = help.lines().next().unwrap_or_default();
    let summary = summary.split_once(": ").map_or(summary, |(_, summary)| summary);
    // A line that begins with a dot or an apostrophe would be a request.
    let body: String = help
        .lines()
        .map(|line| format!("\\&{}\n", line.replace('\\', "\\e").replace('-', "\\-")))
        .collect();
    let name = program.replace('-', "\\-");
    format!(
        ".TH {program} 1 \"\" \"oubliette {}\"\n.SH NAME\n{name} \\- {}\n.SH DESCRIPTION\n.nf\n{body}.fi\n.SH SEE ALSO\n\
         .BR oubliette (1)\n",
        env!("CARGO_PKG_VERSION"),
        summary.replace('-', "\\-")
    )
}

/// What a program prints.
fn output_of(program: &Path, args: &[&str]) -> Result<String> {
    let said = Command::new(program)
        .args(args)
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    if !said.status.success() {
        bail!(
            "{} {} failed ({})",
            program.display(),
            args.join(" "),
            said.status
        );
    }
    String::from_utf8(said.stdout).context("the output is not UTF-8")
}

/// Copies a file, with its parent folders and this mode.
pub(super) fn put(from: &Path, to: &Path, mode: u32) -> Result<()> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode))?;
    Ok(())
}

/// Writes a file with its parent folders, readable to all.
pub(super) fn put_text(text: &str, to: &Path) -> Result<()> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(to, text).with_context(|| format!("cannot write {}", to.display()))?;
    fs::set_permissions(to, fs::Permissions::from_mode(0o644))?;
    Ok(())
}

/// Copies a folder with all its files and their modes.
pub(super) fn put_folder(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        match entry.file_type()?.is_dir() {
            true => put_folder(&entry.path(), &target)?,
            // A link, not a copy: each artifact has the same files.
            false if fs::hard_link(entry.path(), &target).is_ok() => {}
            false => put(
                &entry.path(),
                &target,
                entry.metadata()?.permissions().mode() & 0o777,
            )?,
        }
    }
    Ok(())
}
