//! Embeds the console from `ui/dist` into the program. If it was not built (no Node, or a first build), embeds a page
//! that says how to build it. Also packs relocations, to save memory.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Served in place of a console that was not built.
const PAGE: &str = "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>Oubliette</title>\n\
<h1>Oubliette is running</h1>\n<p>The console was not built into this program. Build it with\n\
<code>npm ci &amp;&amp; npm run build</code> in <code>ui/</code>, then build the server again:\n\
<code>cargo xtask up</code> does both.</p>\n<p>The MCP endpoint is at <code>/mcp</code>, the API at \n\
<a href=\"/api/openapi.json\"><code>/api/openapi.json</code></a>.</p></html>\n";

fn main() {
    pack_relocations();
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    let built = root.join("../../ui/dist");
    println!("cargo:rerun-if-changed={}", built.display());
    println!("cargo:rerun-if-changed={}", built.join("index.html").display());
    let mut files = Vec::new();
    if built.join("index.html").is_file() {
        gather(&built, "", &mut files);
    } else {
        let page = out.join("index.html");
        if let Err(error) = fs::write(&page, PAGE) {
            println!("cargo:warning=writing the page in place of the console failed: {error}");
        }
        files.push(("index.html".to_owned(), page));
    }
    files.sort();
    let rows: String = files
        .iter()
        .map(|(name, path)| format!("    ({name:?}, include_bytes!({path:?})),\n"))
        .collect();
    let table = format!("/// The console's files, by name.\nstatic FILES: &[(&str, &[u8])] = &[\n{rows}];\n");
    if let Err(error) = fs::write(out.join("console.rs"), table) {
        println!("cargo:warning=writing the console's file table failed: {error}");
    }
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
