//! The bill of materials (CycloneDX 1.5, JSON): every crate that is linked into the three programs, with version, licence,
//! checksum, and what it depends on; and every npm package of the console, which the server has in it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
    process::Command,
};

use anyhow::{Context, Result, bail};
use base64::{Engine, prelude::BASE64_STANDARD};
use serde_json::{Value, json};

use super::{Dist, tree::PROGRAMS};

/// Writes the bill beside the other artifacts; returns its path.
pub(super) fn write(dist: &Dist) -> Result<PathBuf> {
    let said = Command::new("cargo")
        .args([
            "metadata",
            "--format-version",
            "1",
            "--locked",
            "--filter-platform",
        ])
        .arg(format!("{}-unknown-linux-gnu", std::env::consts::ARCH))
        .current_dir(&dist.root)
        .output()
        .context("cannot run cargo metadata")?;
    if !said.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&said.stderr));
    }
    let metadata = serde_json::from_slice(&said.stdout).context("cargo metadata printed no JSON")?;
    let lock = fs::read_to_string(dist.root.join("Cargo.lock"))?;
    let mut bill = bill_of(&metadata, &checksums_of(&lock), dist.version)?;
    if dist.root.join("ui/dist/index.html").is_file() {
        let lock = fs::read_to_string(dist.root.join("ui/package-lock.json"))?;
        let lock = serde_json::from_str(&lock).context("ui/package-lock.json is no JSON")?;
        add_console_packages(&mut bill, &lock);
    }
    let path = dist.out.join(format!("{}.cdx.json", dist.name()));
    fs::write(&path, serde_json::to_string_pretty(&bill)? + "\n")?;
    Ok(path)
}

/// Checksums of a Cargo.lock, by name and version.
fn checksums_of(lock: &str) -> BTreeMap<(String, String), String> {
    let mut checksums = BTreeMap::new();
    for package in lock.split("[[package]]") {
        let value = |key: &str| {
            let line = package.lines().find_map(|line| line.strip_prefix(key));
            line.map(|rest| rest.trim_start_matches([' ', '=']).trim_matches('"').to_owned())
        };
        if let (Some(name), Some(version), Some(checksum)) =
            (value("name "), value("version "), value("checksum "))
        {
            checksums.insert((name, version), checksum);
        }
    }
    checksums
}

fn bill_of(metadata: &Value, checksums: &BTreeMap<(String, String), String>, version: &str) -> Result<Value> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let packages: BTreeMap<String, Value> = list(&metadata["packages"])
        .into_iter()
        .map(|package| (text(&package["id"]), package))
        .collect();
    let nodes: BTreeMap<String, Value> = list(&metadata["resolve"]["nodes"])
        .into_iter()
        .map(|node| (text(&node["id"]), node))
        .collect();
    let is_program = |package: &Value| PROGRAMS.contains(&text(&package["name"]).as_str());
    let mut open: Vec<String> = packages
        .iter()
        .filter(|(_, package)| is_program(package))
        .map(|(id, _)| id.clone())
        .collect();
    if open.len() != PROGRAMS.len() {
        bail!("cargo metadata does not know all of {PROGRAMS:?}");
    }
    let mut linked: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    while let Some(id) = open.pop() {
        if linked.contains_key(&id) {
            continue;
        }
        let dependencies = list(&nodes.get(&id).map_or(Value::Null, |node| node["deps"].clone()));
        // Neither build scripts nor tests are in the program.
        let dependencies = dependencies.iter().filter(|dependency| {
            list(&dependency["dep_kinds"])
                .iter()
                .any(|kind| kind["kind"].is_null())
        });
        let dependencies: BTreeSet<String> =
            dependencies.map(|dependency| text(&dependency["pkg"])).collect();
        open.extend(dependencies.iter().cloned());
        linked.insert(id, dependencies);
    }
    let reference = |id: &str| {
        let package = &packages[id];
        format!(
            "pkg:cargo/{}@{}",
            text(&package["name"]),
            text(&package["version"])
        )
    };
    let mut components: Vec<Value> = Vec::new();
    let mut graph: Vec<Value> = Vec::new();
    for (id, dependencies) in &linked {
        let package = &packages[id];
        let (name, package_version) = (text(&package["name"]), text(&package["version"]));
        let mut component = json!({
            "type": if is_program(package) { "application" } else { "library" },
            "bom-ref": reference(id),
            "name": name,
            "version": package_version,
            "purl": reference(id),
        });
        if let Some(licence) = package["license"].as_str() {
            component["licenses"] = json!([{ "expression": licence.replace('/', " OR ") }]);
        }
        if let Some(checksum) = checksums.get(&(name, package_version)) {
            component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
        }
        components.push(component);
        let dependencies: BTreeSet<String> = dependencies.iter().map(|id| reference(id)).collect();
        graph.push(json!({ "ref": reference(id), "dependsOn": dependencies }));
    }
    // By name, because cargo's ids hold paths of this machine.
    components.sort_by_key(|component| text(&component["bom-ref"]));
    graph.sort_by_key(|node| text(&node["ref"]));
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": { "type": "application", "bom-ref": "oubliette", "name": "oubliette", "version": version } },
        "components": components,
        "dependencies": graph,
    }))
}

/// What is in the console of the packages that build it: the framework's part that runs in the browser.
const CONSOLE_FRAMEWORK: [&str; 2] = ["svelte", "clsx"];

/// Adds the packages that the console is bundled from, as its lock file has them.
fn add_console_packages(bill: &mut Value, lock: &Value) {
    let mut packages: BTreeMap<String, Value> = BTreeMap::new();
    for (path, package) in lock["packages"].as_object().into_iter().flatten() {
        let Some((_, name)) = path.rsplit_once("node_modules/") else {
            continue;
        };
        // Types are gone once it is built.
        let is_bundled =
            package["dev"] != true && !name.starts_with("@types/") || CONSOLE_FRAMEWORK.contains(&name);
        if !is_bundled {
            continue;
        }
        let version = text(&package["version"]);
        let reference = format!("pkg:npm/{}@{version}", name.replacen('@', "%40", 1));
        let mut component = json!({
            "type": "library", "bom-ref": reference, "name": name, "version": version, "purl": reference,
        });
        if let Some(licence) = package["license"].as_str() {
            component["licenses"] = json!([{ "expression": licence.trim_matches(['(', ')']) }]);
        }
        if let Some(digest) = text(&package["integrity"])
            .strip_prefix("sha512-")
            .and_then(hex_of_base64)
        {
            component["hashes"] = json!([{ "alg": "SHA-512", "content": digest }]);
        }
        packages.insert(reference, component);
    }
    let references: Vec<&String> = packages.keys().collect();
    for node in bill["dependencies"].as_array_mut().into_iter().flatten() {
        let is_server = text(&node["ref"]).starts_with("pkg:cargo/oubliette@");
        if let (true, Some(dependencies)) = (is_server, node["dependsOn"].as_array_mut()) {
            dependencies.extend(references.iter().map(|reference| json!(reference)));
        }
    }
    if let Some(components) = bill["components"].as_array_mut() {
        components.extend(packages.into_values());
    }
}

/// Bytes in base64 as hexadecimal digits; none if it is not base64.
fn hex_of_base64(text: &str) -> Option<String> {
    BASE64_STANDARD.decode(text).ok().map(hex::encode)
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_linked_is_listed_and_what_only_builds_or_tests_is_not() {
        let package =
            |name: &str| json!({ "id": name, "name": name, "version": "1.0.0", "license": "MIT/Apache-2.0" });
        let uses = |name: &str, kind: Value| json!({ "pkg": name, "dep_kinds": [{ "kind": kind }] });
        let metadata = json!({
            "packages": [package("oubliette"), package("oubliette-client"), package("oubliette-agent"),
                         package("linked"), package("tested"), package("further")],
            "resolve": { "nodes": [
                { "id": "oubliette", "deps": [uses("linked", Value::Null), uses("tested", "dev".into())] },
                { "id": "linked", "deps": [uses("further", Value::Null)] },
            ] },
        });
        let lock = "[[package]]\nname = \"linked\"\nversion = \"1.0.0\"\nchecksum = \"ab\"\n";
        let bill = bill_of(&metadata, &checksums_of(lock), "1.0.0").unwrap();
        let names: Vec<_> = bill["components"]
            .as_array()
            .unwrap()
            .iter()
            .map(|c| text(&c["name"]))
            .collect();
        assert_eq!(
            names,
            [
                "further",
                "linked",
                "oubliette-agent",
                "oubliette-client",
                "oubliette"
            ]
        );
        assert_eq!(bill["components"][1]["hashes"][0]["content"], "ab");
        assert_eq!(
            bill["components"][1]["licenses"][0]["expression"],
            "MIT OR Apache-2.0"
        );
        assert_eq!(
            bill["dependencies"][1]["dependsOn"],
            json!(["pkg:cargo/further@1.0.0"])
        );
    }

    #[test]
    fn packages_of_the_console_are_listed_and_what_only_builds_it_is_not() {
        let package = |dev: bool| json!({ "version": "1.2.3", "license": "(MIT OR Apache-2.0)", "integrity": "sha512-AAH/", "dev": dev });
        let lock = json!({ "packages": {
            "": { "name": "console" },
            "node_modules/marked": package(false),
            "node_modules/@scope/part": package(false),
            "node_modules/@types/marked": package(false),
            "node_modules/svelte": package(true),
            "node_modules/vite": package(true),
        } });
        let mut bill = json!({
            "components": [],
            "dependencies": [{ "ref": "pkg:cargo/oubliette@0.1.0", "dependsOn": [] }, { "ref": "pkg:cargo/x@1.0.0", "dependsOn": [] }],
        });
        add_console_packages(&mut bill, &lock);
        let references = json!([
            "pkg:npm/%40scope/part@1.2.3",
            "pkg:npm/marked@1.2.3",
            "pkg:npm/svelte@1.2.3"
        ]);
        assert_eq!(bill["dependencies"][0]["dependsOn"], references);
        assert_eq!(bill["dependencies"][1]["dependsOn"], json!([]));
        assert_eq!(bill["components"][0]["name"], "@scope/part");
        assert_eq!(bill["components"][2]["hashes"][0]["content"], "0001ff");
        assert_eq!(
            bill["components"][1]["licenses"][0]["expression"],
            "MIT OR Apache-2.0"
        );
    }
}
