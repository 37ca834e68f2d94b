//! Random cases for every day: `qgemm verify --stress` from seeds that the date draws, on the CPU and on one emulated GPU.

use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds that each device gets.
const SECONDS: &str = "60";
/// Seeds of a day: more than any machine gets through.
const SEEDS_OF_A_DAY: u64 = 1_000_000;
/// The emulated variants, each of which has its turn.
const VARIANTS: [&str; 6] = ["emu:sm70", "emu:sm75", "emu:sm80", "emu:sm89", "emu:sm90", "emu:sm120"];

/// The arguments for cargo of today's runs.
pub fn runs_of_today() -> [Vec<String>; 2] {
    runs(today())
}

/// Days since 1970.
pub fn today() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / (24 * 60 * 60))
}

fn runs(day: u64) -> [Vec<String>; 2] {
    let seed = (day * SEEDS_OF_A_DAY).to_string();
    let variant = VARIANTS[(day % VARIANTS.len() as u64) as usize];
    ["cpu", variant].map(|device| {
        // Unoptimized, the oracle would take most of the time.
        let cargo = ["run", "--release", "--quiet", "--package", "qgemm-cli", "--"];
        let verify = ["verify", "--failures", "--stress", SECONDS, "--seed", &seed, "--device", device];
        cargo.into_iter().chain(verify).map(str::to_owned).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_draw_other_seeds_and_variants_by_turns() {
        let device = |day: u64| runs(day)[1].last().cloned().expect("arguments");
        let mut six: Vec<String> = (20_780..20_786).map(device).collect();
        assert_eq!(device(20_786), six[0]);
        six.sort();
        six.dedup();
        assert_eq!(six.len(), VARIANTS.len());
        let seed = |day: u64| runs(day)[0].iter().find_map(|argument| argument.parse::<u64>().ok().filter(|&n| n > 60));
        assert_eq!(seed(20_781), seed(20_780).map(|seed| seed + SEEDS_OF_A_DAY));
    }
}
