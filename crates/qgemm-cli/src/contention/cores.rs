//! Time of the cores, from Linux's `/proc`.

use std::fs;
use std::time::Instant;

/// Share of the cores that others may use without a remark.
const OTHERS: f64 = 0.1;
/// Share that a hypervisor may take without a remark.
const STOLEN: f64 = 0.02;

/// Times of all cores at a moment, in clock ticks.
pub struct Cores {
    at: Instant,
    ticks: Ticks,
}

/// Clock ticks since the start of the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Ticks {
    /// All cores, idle or not.
    all: f64,
    /// All cores at work.
    busy: f64,
    /// Taken by a hypervisor.
    stolen: f64,
    /// This process at work.
    own: f64,
}

impl Cores {
    /// Now. `None` if the system does not report it.
    pub fn now() -> Option<Self> {
        let stat = fs::read_to_string("/proc/stat").ok()?;
        let own = fs::read_to_string("/proc/self/stat").ok()?;
        Some(Self { at: Instant::now(), ticks: parse(&stat, &own)? })
    }

    /// Other work since then, in words. `None` if there was little, or
    /// the time is too short to tell.
    pub fn others_since(&self) -> Option<String> {
        const LEAST_SECONDS: f64 = 0.2;
        let now = Self::now()?;
        if (now.at - self.at).as_secs_f64() < LEAST_SECONDS {
            return None;
        }
        others(self.ticks, now.ticks)
    }
}

fn others(before: Ticks, now: Ticks) -> Option<String> {
    let all = now.all - before.all;
    if all <= 0.0 {
        return None;
    }
    let stolen = (now.stolen - before.stolen) / all;
    let others = ((now.busy - before.busy) - (now.own - before.own)) / all;
    if stolen > STOLEN {
        return Some(format!("the hypervisor took {:.0} % of the cores' time", stolen * 100.0));
    }
    (others > OTHERS).then(|| format!("other processes took {:.0} % of the cores' time", others * 100.0))
}

/// Parses `/proc/stat` and `/proc/self/stat`.
fn parse(stat: &str, own: &str) -> Option<Ticks> {
    // user nice system idle iowait irq softirq steal; guests are part of user.
    let cores = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let times: Vec<f64> = cores.split_whitespace().map_while(|time| time.parse().ok()).take(8).collect();
    let &[user, nice, system, idle, wait, irq, soft, stolen] = times.as_slice() else { return None };
    let busy = user + nice + system + irq + soft;
    // The program's name may contain spaces and parentheses.
    let mut fields = own.rsplit_once(')')?.1.split_whitespace().skip(11);
    let own = fields.next()?.parse::<f64>().ok()? + fields.next()?.parse::<f64>().ok()?;
    Some(Ticks { all: busy + idle + wait + stolen, busy, stolen, own })
}

/// Processes that wanted a core, on average of the last minute.
pub fn load_average() -> Option<f64> {
    fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_parse() {
        let stat = "cpu  100 10 20 800 5 1 2 7 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n";
        let own = "77 (a (b) c) R 1 1 1 0 -1 4194304 100 0 0 0 30 12 0 0 20 0 1 0 5 6 7";
        let ticks = parse(stat, own).expect("valid");
        assert_eq!(ticks, Ticks { all: 945.0, busy: 133.0, stolen: 7.0, own: 42.0 });
        assert!(parse("cpu 1 2", own).is_none() && parse(stat, "").is_none());
    }

    #[test]
    fn work_of_others_is_told_from_our_own() {
        let before = Ticks::default();
        let now = |busy, stolen, own| Ticks { all: 100.0, busy, stolen, own };
        assert_eq!(others(before, now(95.0, 0.0, 90.0)), None);
        assert!(others(before, now(95.0, 0.0, 45.0)).is_some_and(|text| text.contains("50 %")));
        assert!(others(before, now(90.0, 5.0, 90.0)).is_some_and(|text| text.contains("hypervisor took 5 %")));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn linux_reports_them() {
        assert!(Cores::now().is_some() && load_average().is_some_and(|load| load >= 0.0));
    }
}
