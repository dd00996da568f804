//! Embeds the console from `ui/dist` and the book from `docs/book` into the program. In place of one that was not built
//! (no Node, or a first build) it embeds a page that says how to build it. Also packs relocations, to save memory.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Served in place of a console that was not built.
const CONSOLE_PAGE: &str = "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>Oubliette</title>\n\
<h1>Oubliette is running</h1>\n<p>The console was not built into this program. Build it with\n\
<code>npm ci --ignore-scripts &amp;&amp; npm run build</code> in <code>ui/</code>, then build the server again:\n\
<code>cargo xtask up</code> does both.</p>\n<p>The MCP endpoint is at <code>/mcp</code>, the API at \n\
<a href=\"/api/openapi.json\"><code>/api/openapi.json</code></a>.</p></html>\n";

/// Served in place of a book that was not built.
const BOOK_PAGE: &str = "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>Oubliette</title>\n\
<h1>The book was not built into this program</h1>\n<p><code>cargo xtask docs</code> builds it; then build the server again.\n\
The same text is in <code>docs/src</code> of the source tree.</p></html>\n";

fn main() {
    pack_relocations();
    name_build();
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    embed(
        &root.join("../../ui/dist"),
        "console",
        "CONSOLE_FILES",
        CONSOLE_PAGE,
    );
    embed(&root.join("../../docs/book"), "book", "BOOK_FILES", BOOK_PAGE);
}

/// Writes `<name>.rs` with a table of the files of a folder by name, or of `page` as index.html if there are none.
fn embed(built: &Path, name: &str, table: &str, page: &str) {
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    println!("cargo:rerun-if-changed={}", built.display());
    println!("cargo:rerun-if-changed={}", built.join("index.html").display());
    let mut files = Vec::new();
    if built.join("index.html").is_file() {
        gather(built, "", &mut files);
    } else {
        let path = out.join(format!("{name}.html"));
        if let Err(error) = fs::write(&path, page) {
            println!("cargo:warning=writing the page in place of the {name} failed: {error}");
        }
        files.push(("index.html".to_owned(), path));
    }
    files.sort();
    let rows: String = files
        .iter()
        .map(|(name, path)| format!("    ({name:?}, include_bytes!({path:?})),\n"))
        .collect();
    let text =
        format!("/// The files of the {name}, by name.\nstatic {table}: &[(&str, &[u8])] = &[\n{rows}];\n");
    if let Err(error) = fs::write(out.join(format!("{name}.rs")), text) {
        println!("cargo:warning=writing the file table of the {name} failed: {error}");
    }
}

/// Sets `OUBLIETTE_BUILD` for `--version`: commit, build profile and target. The commit is given by `OUBLIETTE_COMMIT`, or
/// asked of git.
fn name_build() {
    println!("cargo:rerun-if-env-changed=OUBLIETTE_COMMIT");
    let git = |args: &[&str]| {
        let said = Command::new("git").args(args).output().ok()?;
        let said_text = String::from_utf8(said.stdout).ok()?.trim().to_owned();
        (said.status.success() && !said_text.is_empty()).then_some(said_text)
    };
    // A release names the commit it is of. A debug build may name an older one: otherwise every commit would compile the server.
    let is_release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let log =
        git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|log| is_release && Path::new(log).exists());
    if let Some(log) = log {
        println!("cargo:rerun-if-changed={log}");
    }
    let asked = || git(&["rev-parse", "--short=12", "HEAD"]);
    let commit = env::var("OUBLIETTE_COMMIT")
        .ok()
        .filter(|commit| !commit.is_empty());
    let commit = commit.or_else(asked).unwrap_or_else(|| "unknown".to_owned());
    let (profile, target) = (
        env::var("PROFILE").unwrap_or_default(),
        env::var("TARGET").unwrap_or_default(),
    );
    println!("cargo:rustc-env=OUBLIETTE_BUILD=commit {commit}, {profile} build for {target}");
}

/// Asks the linker for packed relative relocations. A position-independent program has a table of addresses to adjust
/// at start: here over a megabyte, all of it read; packed, a few kilobytes. Needs glibc 2.36 or newer at run time.
fn pack_relocations() {
    let native = env::var("TARGET").ok() == env::var("HOST").ok();
    if native && glibc().is_some_and(|version| version >= (2, 36)) {
        println!("cargo:rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}

/// The version of glibc; none with another C library.
fn glibc() -> Option<(u32, u32)> {
    let said = Command::new("getconf").arg("GNU_LIBC_VERSION").output().ok()?;
    let said = String::from_utf8(said.stdout).ok()?;
    let (major, minor) = said.trim().strip_prefix("glibc ")?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Collects every file below a folder: its path relative to the folder, with slashes, and its full path.
fn gather(dir: &Path, prefix: &str, files: &mut Vec<(String, PathBuf)>) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        match entry.path().is_dir() {
            true => gather(&entry.path(), &format!("{name}/"), files),
            false => files.push((name, entry.path())),
        }
    }
}
