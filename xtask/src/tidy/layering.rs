//! Crate layering, checked against `cargo metadata`.

use std::collections::BTreeMap;

use anyhow::Context;
use serde_json::Value;

use super::finding::Finding;
use xtask::workspace;

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
    ("xtask", &["qgemm-formats"]),
    ("xtask-kernels", &["xtask", "qgemm-formats", "qgemm-hal", "qgemm-cuda"]),
];

/// The test kit and what it tests through. Any crate
/// may use them in its tests.
const TEST_ONLY: [&str; 2] = ["qgemm-testkit", "qgemm-api"];

/// A crate of the workspace.
struct Package {
    name: String,
    has_readme: bool,
    /// Whether it may be published to any registry.
    is_published: bool,
    dependencies: Vec<Dependency>,
}

struct Dependency {
    name: String,
    /// `None` for a normal dependency, else `dev` or `build`.
    kind: Option<String>,
}

/// Checks every dependency between crates of the workspace.
pub fn check() -> anyhow::Result<Vec<Finding>> {
    let json = workspace::output(workspace::cargo().args(["metadata", "--no-deps", "--format-version", "1"]))?;
    let metadata: Value = serde_json::from_str(&json)?;
    let packages = metadata["packages"].as_array().context("`cargo metadata` lists no packages")?;
    Ok(violations(&packages.iter().map(package).collect::<Vec<_>>()))
}

/// A package of `cargo metadata`.
fn package(json: &Value) -> Package {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let dependency =
        |json: &Value| Dependency { name: text(&json["name"]).unwrap_or_default(), kind: text(&json["kind"]) };
    Package {
        name: text(&json["name"]).unwrap_or_default(),
        has_readme: json["readme"].is_string(),
        is_published: json["publish"].is_null(),
        dependencies: json["dependencies"].as_array().into_iter().flatten().map(dependency).collect(),
    }
}

fn violations(packages: &[Package]) -> Vec<Finding> {
    let allowed: BTreeMap<&str, &[&str]> = ALLOWED.iter().copied().collect();
    let members: Vec<&str> = packages.iter().map(|p| p.name.as_str()).collect();
    let mut findings = Vec::new();
    for package in packages {
        if package.is_published && !package.has_readme {
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

    fn package(name: &str, dependency: &str, kind: Option<&str>) -> [Package; 2] {
        let dependency = Dependency { name: dependency.into(), kind: kind.map(Into::into) };
        let package = |name: &str, dependencies| Package {
            name: name.into(),
            has_readme: true,
            is_published: true,
            dependencies,
        };
        let other = package(&dependency.name, Vec::new());
        [package(name, vec![dependency]), other]
    }

    #[test]
    fn a_package_is_read_from_cargos_description() {
        let json = r#"{"name": "a", "readme": null, "publish": [], "dependencies": [{"name": "b", "kind": "dev"}]}"#;
        let read = super::package(&serde_json::from_str(json).unwrap());
        assert_eq!((read.name.as_str(), read.has_readme, read.is_published), ("a", false, false));
        assert_eq!((read.dependencies[0].name.as_str(), read.dependencies[0].kind.as_deref()), ("b", Some("dev")));
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
        let mut packages = package("qgemm-sched", "qgemm-hal", None);
        packages[0].has_readme = false;
        assert_eq!(violations(&packages).len(), 1);
        packages[0].is_published = false;
        assert_eq!(violations(&packages).len(), 0);
    }

    #[test]
    fn a_crate_without_a_layer_is_found() {
        assert_eq!(violations(&package("qgemm-new", "qgemm-api", None)).len(), 1);
    }
}
