//! Origin of a report's results: device, date, commit and command, as
//! the files state them.

use std::collections::BTreeSet;

use super::input::{Inputs, Run};
use super::page::{Cell, Page};
use crate::provenance::Provenance;

/// Text in place of what a file does not state.
const NOT_RECORDED: &str = "not recorded";

/// One way that results were made.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Origin {
    what: String,
    device: Option<String>,
    driver: Option<String>,
    date: Option<String>,
    commit: Option<String>,
    command: Option<String>,
}

/// The origins of a report.
pub struct Origins(Vec<Origin>);

impl Origins {
    /// Origins of all files, each once.
    pub fn of(inputs: &Inputs) -> Self {
        let mut all = Vec::new();
        let mut add = |what: &str, rows: Vec<(Option<&str>, &Provenance)>| {
            let rows = rows.into_iter().map(|(device, provenance)| Origin::measured(what, device, provenance));
            let unique: BTreeSet<Origin> = rows.collect();
            all.extend(unique);
        };
        add("conformance", inputs.cases.iter().map(|case| (case.device.as_deref(), &case.provenance)).collect());
        add("sweep", inputs.sweep.iter().map(|point| (point.device.as_deref(), &point.provenance)).collect());
        add("results", inputs.bench.iter().map(|point| (Some(point.device.as_str()), &point.provenance)).collect());
        let baseline = inputs.baseline.iter().flatten();
        add("baseline", baseline.map(|point| (Some(point.device.as_str()), &point.provenance)).collect());
        if let Some(plan) = &inputs.plan {
            let device = &plan.runtime.device;
            let driver = Some(device.driver.clone());
            let what = format!("plan for {}", device.id);
            all.push(Origin::measured(&what, Some(&device.name), &Provenance { driver, ..Provenance::default() }));
        }
        if let Some(results) = &inputs.results {
            let runs = results.runs.iter().filter(|run| !run.hidden);
            let through = Some(results.through.as_str());
            let unique: BTreeSet<Origin> = runs.map(|run| Origin::run(run, &results.device, through)).collect();
            all.extend(unique);
        }
        Self(all)
    }

    /// Title of the page: its devices.
    pub fn title(&self) -> String {
        let mut devices: Vec<&str> = Vec::new();
        for device in self.0.iter().filter_map(|origin| origin.device.as_deref()) {
            if !devices.contains(&device) {
                devices.push(device);
            }
        }
        match devices[..] {
            [] => format!("qgemm: device {NOT_RECORDED}"),
            _ => format!("qgemm on {}", devices.join(", ")),
        }
    }

    /// Adds the table of origins.
    pub fn show(&self, page: &mut Page) {
        let cell = |text: &Option<String>| match text.as_deref() {
            Some("") => Cell::from("none"),
            Some(text) => Cell::from(text),
            None => Cell::from(NOT_RECORDED),
        };
        let row = |origin: &Origin| {
            let Origin { what, device, driver, date, commit, command } = origin;
            vec![Cell::from(what.as_str()), cell(device), cell(driver), cell(date), cell(commit), cell(command)]
        };
        page.section("Origin");
        page.table(
            &["what", "device", "driver or API", "date", "version or commit", "command"],
            self.0.iter().map(row).collect(),
        );
    }
}

impl Origin {
    fn measured(what: &str, device: Option<&str>, provenance: &Provenance) -> Self {
        let Provenance { driver, date, commit, command } = provenance.clone();
        Self { what: what.to_owned(), device: device.map(str::to_owned), driver, date, commit, command }
    }

    fn run(run: &Run, device: &str, through: Option<&str>) -> Self {
        Self {
            what: format!("time against tokens: {}", run.name.as_ref().unwrap_or(&run.by)),
            device: Some(device.to_owned()),
            driver: through.map(str::to_owned),
            date: run.date.clone(),
            commit: run.commit.clone().or_else(|| run.version.clone()),
            command: run.command.clone(),
        }
    }
}
