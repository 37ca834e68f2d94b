//! Variables of the environment, and the table of tuned configs.

use std::env;

use qgemm_api::{read_tuned, tuned_table_path};

use super::finding::Finding;

/// Every variable, as `docs/guide/environment.md` lists them.
const VARIABLES: [&str; 19] = [
    "QGEMM_KERNELS",
    "QGEMM_EMBED_KERNELS",
    "QGEMM_CACHE",
    "QGEMM_NVRTC",
    "QGEMM_NCCL",
    "QGEMM_ONE_SHOT",
    "QGEMM_CUPTI",
    "QGEMM_NVDISASM",
    "QGEMM_VARIANT",
    "QGEMM_TUNED",
    "QGEMM_GUARDS",
    "QGEMM_CXX",
    "QGEMM_LOG",
    "QGEMM_CONFORMANCE",
    "QGEMM_REQUIRE_DEVICE",
    "QGEMM_RECORD",
    "QGEMM_TEST_MODEL",
    "QGEMM_TEST_LANGUAGE_MODEL",
    "QGEMM_TEST_CACHE",
];

/// Variables that make kernels slower, and how.
const SLOWER: [(&str, &str); 2] = [
    ("QGEMM_VARIANT", "kernels of an older chip run: unset it for full speed"),
    ("QGEMM_GUARDS", "allocations are guarded and compared: unset it for full speed"),
];

/// Findings about the environment.
pub fn findings() -> Vec<Finding> {
    let names = env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    let mut ours: Vec<(String, String)> = names
        .filter(|(name, _)| name.starts_with("QGEMM_"))
        .map(|(name, value)| (name, value.to_string_lossy().into_owned()))
        .collect();
    ours.sort();
    let mut all = vec![tuned()];
    all.extend(ours.iter().map(|(name, value)| variable(name, value)));
    all
}

fn variable(name: &str, value: &str) -> Finding {
    let found = format!("{name}={value}");
    if !VARIABLES.contains(&name) {
        return Finding::warn(
            "environment",
            found,
            format!("qgemm knows no such variable, but {}", VARIABLES.join(", ")),
        );
    }
    match SLOWER.iter().find(|(slower, _)| *slower == name && !value.is_empty() && value != "0") {
        Some((_, why)) => Finding::warn("environment", found, *why),
        None => Finding::ok("environment", found),
    }
}

fn tuned() -> Finding {
    let Some(path) = tuned_table_path() else {
        return Finding::ok("tuned table", "there is no folder for it");
    };
    match read_tuned(&path) {
        Ok(None) => Finding::ok("tuned table", format!("{}: none; `qgemm tune` makes it", path.display())),
        Ok(Some(table)) => Finding::ok("tuned table", format!("{}: {} measurements", path.display(), table.len())),
        Err(error) => {
            let found = format!("{}: {error}", path.display());
            Finding::fail("tuned table", found, "contexts with `Tuned::Auto` do not use it: delete it and tune again")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Status;
    use super::*;

    #[test]
    fn the_guide_lists_these_variables() {
        let guide = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/guide/environment.md");
        let guide = std::fs::read_to_string(guide).expect("readable");
        let listed = guide.lines().filter_map(|line| line.strip_prefix("| `QGEMM_")?.split('`').next());
        let listed: Vec<String> = listed.map(|name| format!("QGEMM_{name}")).collect();
        assert_eq!(listed, VARIABLES);
    }

    #[test]
    fn misspelt_variables_are_warned_of() {
        assert_eq!(variable("QGEMM_CASHE", "x").status, Status::Warn);
        assert_eq!(
            [variable("QGEMM_GUARDS", "1").status, variable("QGEMM_GUARDS", "0").status],
            [Status::Warn, Status::Ok]
        );
    }
}
