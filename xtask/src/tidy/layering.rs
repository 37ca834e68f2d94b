//! Crate layering, checked against `cargo metadata`.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::finding::Finding;
use crate::workspace;

/// Allowed dependencies of each crate, outside of tests.
/// Unlisted crates are an error.
const ALLOWED: &[(&str, &[&str])] = &[
    ("qgemm-formats", &[]),
    ("qgemm-hal", &["qgemm-formats"]),
    ("qgemm-sched", &["qgemm-hal", "qgemm-formats"]),
    ("qgemm-cpu", &["qgemm-hal", "qgemm-formats"]),
    ("qgemm-cuda", &["qgemm-hal", "qgemm-formats"]),
    ("qgemm-wgpu", &["qgemm-hal", "qgemm-formats"]),
    ("qgemm-emu", &["qgemm-hal", "qgemm-formats", "qgemm-cuda"]),
    ("qgemm-api", &["qgemm-formats", "qgemm-hal", "qgemm-sched", "qgemm-cpu", "qgemm-cuda", "qgemm-wgpu", "qgemm-emu"]),
    ("qgemm-model", &["qgemm-api"]),
    ("qgemm-testkit", &["qgemm-api", "qgemm-formats", "qgemm-hal"]),
    ("qgemm-cli", &["qgemm-api", "qgemm-model", "qgemm-testkit"]),
    ("qgemm-benches", &["qgemm-api", "qgemm-cuda", "qgemm-testkit"]),
    ("xtask", &["qgemm-formats", "qgemm-hal", "qgemm-cuda"]),
];

/// The test kit and what it tests through. Any crate
/// may use them in its tests.
const TEST_ONLY: [&str; 2] = ["qgemm-testkit", "qgemm-api"];

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    readme: Option<String>,
    /// Registries that it may be published to; `None` for any.
    publish: Option<Vec<String>>,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// `None` for a normal dependency, else `dev` or `build`.
    kind: Option<String>,
}

/// Checks every dependency between crates of the workspace.
pub fn check() -> anyhow::Result<Vec<Finding>> {
    let json = workspace::output(workspace::cargo().args(["metadata", "--no-deps", "--format-version", "1"]))?;
    Ok(violations(&serde_json::from_str(&json)?))
}

fn violations(metadata: &Metadata) -> Vec<Finding> {
    let allowed: BTreeMap<&str, &[&str]> = ALLOWED.iter().copied().collect();
    let members: Vec<&str> = metadata.packages.iter().map(|p| p.name.as_str()).collect();
    let mut findings = Vec::new();
    for package in &metadata.packages {
        if package.publish.is_none() && package.readme.is_none() {
            findings
                .push(Finding::in_file("Cargo.toml", format!("{}: published crates have a README.md", package.name)));
        }
        let Some(may_use) = allowed.get(package.name.as_str()) else {
            findings.push(Finding::in_file("Cargo.toml", format!("{}: no layer is stated for it", package.name)));
            continue;
        };
        for dependency in package.dependencies.iter().filter(|d| members.contains(&d.name.as_str())) {
            let name = dependency.name.as_str();
            let in_tests = dependency.kind.as_deref() == Some("dev") && TEST_ONLY.contains(&name);
            if !in_tests && !may_use.contains(&name) {
                let what = format!("{} may not depend on {name}; it may use {may_use:?}", package.name);
                findings.push(Finding::in_file("Cargo.toml", what));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, dependency: &str, kind: Option<&str>) -> Metadata {
        let dependency = Dependency { name: dependency.into(), kind: kind.map(Into::into) };
        let package = |name: &str, dependencies| Package {
            name: name.into(),
            readme: Some("README.md".into()),
            publish: None,
            dependencies,
        };
        let other = package(&dependency.name, Vec::new());
        Metadata { packages: vec![package(name, vec![dependency]), other] }
    }

    #[test]
    fn a_backend_may_not_schedule_and_formats_may_not_know_devices() {
        assert_eq!(violations(&package("qgemm-cuda", "qgemm-sched", None)).len(), 1);
        assert_eq!(violations(&package("qgemm-formats", "qgemm-hal", Some("dev"))).len(), 1);
        assert_eq!(violations(&package("qgemm-cpu", "qgemm-wgpu", Some("build"))).len(), 1);
        assert_eq!(violations(&package("qgemm-sched", "qgemm-hal", None)).len(), 0);
    }

    #[test]
    fn the_test_kit_is_for_tests() {
        for name in TEST_ONLY {
            assert_eq!(violations(&package("qgemm-cuda", name, Some("dev"))).len(), 0);
            assert_eq!(violations(&package("qgemm-cuda", name, None)).len(), 1);
        }
    }

    #[test]
    fn a_published_crate_without_a_readme_is_found() {
        let mut metadata = package("qgemm-sched", "qgemm-hal", None);
        metadata.packages[0].readme = None;
        assert_eq!(violations(&metadata).len(), 1);
        metadata.packages[0].publish = Some(Vec::new());
        assert_eq!(violations(&metadata).len(), 0);
    }

    #[test]
    fn a_crate_without_a_layer_is_found() {
        assert_eq!(violations(&package("qgemm-new", "qgemm-api", None)).len(), 1);
    }
}
