//! Finds the console to build in. Without one (no Node here, or a first build) a page stands in for it
//! that says how to get it. And keeps the program small in memory.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

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
            println!("cargo:warning=the console's stand-in could not be written: {error}");
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
        println!("cargo:warning=the console could not be built in: {error}");
    }
}

/// A program that may lie anywhere in memory carries a list of the places to adjust at its start, over a
/// megabyte of it here and read whole. Packed it takes a few kilobytes. The C library must know how to read that.
fn pack_relocations() {
    let native = env::var("TARGET").ok() == env::var("HOST").ok();
    if native && glibc().is_some_and(|version| version >= (2, 36)) {
        println!("cargo:rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}

/// The version of the C library, where it is GNU's.
fn glibc() -> Option<(u32, u32)> {
    let said = Command::new("getconf").arg("GNU_LIBC_VERSION").output().ok()?;
    let said = String::from_utf8(said.stdout).ok()?;
    let (major, minor) = said.trim().strip_prefix("glibc ")?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Every file below a folder, named with slashes.
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
