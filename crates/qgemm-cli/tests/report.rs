//! Reports as a user sees them: contents of the page, and
//! its rendering in a browser.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{model, qgemm, succeeds, text};

/// Writes a page with every section into `folder`, from 1000 results each.
fn report(folder: &Path) -> PathBuf {
    let path = |name: &str| folder.join(name);
    let write = |name: &str, value: Value| fs::write(path(name), value.to_string()).expect("writable");
    let cases: Vec<Value> = (0..1000)
        .map(|i| {
            let (verdict, detail) = match i {
                7 => ("FAIL", json!("row <3> is off")),
                8..20 => ("skip", json!("not served")),
                _ => ("pass", Value::Null),
            };
            json!({"case": format!("case {i}"), "nmse": 1e-10, "limit": 1e-9, "verdict": verdict, "detail": detail})
        })
        .collect();
    write("verify.json", json!(cases));
    let bench = |factor: f64| -> Vec<Value> {
        (0..1000)
            .map(|i| {
                let slower = if i == 5 { factor } else { 1.0 };
                json!({"device": "d", "shape": format!("{i}x64x64"), "format": "q4_0", "x_dtype": "f16", "kernel": "k",
                       "microseconds": 10.0 * slower, "noise": 0.01, "bytes_per_second": 1e9, "flops": 1e9,
                       "bandwidth_share": 0.5, "copies": 2, "graph": false})
            })
            .collect()
    };
    write("now.json", json!(bench(1.5)));
    write("before.json", json!(bench(1.0)));
    let sweep = |i: usize| {
        json!({"format": "q4_0", "m": i + 1, "n": 64, "k": 64, "family": "gemm", "microseconds": 10.0 + i as f64,
               "estimated_microseconds": 11.0 + i as f64, "planned": true})
    };
    write("sweep.json", json!((0..1000).map(sweep).collect::<Vec<_>>()));
    let model = model(folder);
    succeeds(&["plan", text(&model), "--batch", "4", "--device", "cpu", "-o", text(&path("plan.json"))]);
    let results = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/results/h200.json");
    let output = path("report.html");
    let files = [
        ("--verify", path("verify.json")),
        ("--bench", path("now.json")),
        ("--baseline", path("before.json")),
        ("--sweep", path("sweep.json")),
        ("--plan", path("plan.json")),
        ("--results", results.into()),
        ("-o", output.clone()),
    ];
    let mut arguments = vec!["report"];
    files.iter().for_each(|(option, path)| arguments.extend([*option, text(path)]));
    succeeds(&arguments);
    output
}

#[test]
fn a_report_is_one_page_with_everything_in_it() {
    let folder = tempfile::tempdir().expect("writable");
    let output = report(folder.path());
    let html = fs::read_to_string(&output).expect("written");
    assert!(html.len() < 2 << 20, "{} bytes", html.len());
    for section in [
        "Origin",
        "Conformance",
        "Roofline of a model",
        "Time against tokens",
        "Predicted against measured",
        "Against the baseline",
    ] {
        assert!(html.contains(section), "{section} is missing");
    }
    for content in [
        "<b>987</b>",
        "<b>1</b><span>failed",
        "<b>12</b><span>skipped",
        "row &lt;3&gt; is off",
        "Marlin int4 g128",
        "roof: ",
        "<b>1</b><span>regressions beyond the noise",
        "<span class=\"bad\">+50.0 %</span>",
        "prefers-color-scheme:dark",
        "width=device-width",
        "attn_output",
    ] {
        assert!(html.contains(content), "{content} is missing");
    }
    assert_eq!(html.matches("role=\"img\"").count(), 4, "roofline, two shapes, predicted");
    // Every point has its values.
    let points = html.matches("class=\"m\" d=").count() - html.matches("aria-hidden").count();
    let guides = html.matches("<polyline class=\"r\"").count();
    assert!(points > 1000 && guides >= 2, "{points} points, {guides} guides");
    assert!(html.contains("<title>qgemm int4_g128: 16 tokens, "), "values on hover");
    // The page loads nothing.
    let without_names = html.replace("http://www.w3.org/2000/svg", "");
    assert!(["http:", "https:", "src=", "href=", "url("].iter().all(|word| !without_names.contains(word)));
    let broken = qgemm(&["report", "--plan", text(&folder.path().join("verify.json")), "-o", text(&output)]);
    assert!(!broken.status.success() && String::from_utf8_lossy(&broken.stderr).contains("something else"));
    assert_eq!(fs::read_to_string(&output).expect("there"), html, "a failure leaves what was there");
}

#[test]
fn the_origin_is_that_of_the_results_and_not_of_this_machine() {
    let folder = tempfile::tempdir().expect("writable");
    let path = |name: &str| folder.path().join(name);
    let results = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/results/h200.json");
    let page = |arguments: &[&str]| -> Value {
        serde_json::from_str(&succeeds(&[&["report", "--json"], arguments].concat())).expect("JSON")
    };
    let published = page(&["--results", results]);
    assert_eq!(published["title"], "qgemm on NVIDIA H200");
    let shown = published.to_string();
    assert!(
        ["Marlin int4 g128", "2026-1", "qgemm bench --device cuda:0", "×"].iter().all(|part| shown.contains(part)),
        "{shown}"
    );
    let cpu = qgemm_api::Context::open("cpu").expect("always there").info().name.clone();
    assert!(!shown.contains(&cpu), "{cpu} measured nothing");
    // A file of an earlier version.
    let old = json!([{"device": "Old Card", "shape": "1x64x64", "format": "q4_0", "x_dtype": "f16", "microseconds": 1.0,
        "noise": 0.0, "bandwidth_share": 1.47}]);
    fs::write(path("old.json"), old.to_string()).expect("writable");
    let old = page(&["--bench", text(&path("old.json"))]);
    let origin = &old["contents"][1]["rows"][0];
    assert_eq!(*origin, json!(["results", "Old Card", "not recorded", "not recorded", "not recorded", "not recorded"]));
    assert!(old.to_string().contains("> roof") && !old.to_string().contains("147"), "{old}");
    // What this version measures.
    let saved = path("new.json");
    succeeds(&["bench", "--device", "cpu", "--shape", "1x64x64", "--save", text(&saved)]);
    let new = page(&["--bench", text(&saved)]);
    let origin = &new["contents"][1]["rows"][0];
    assert_eq!((&origin[1], &origin[2]), (&json!(cpu), &json!("none")));
    let command = origin[5].as_str().expect("recorded");
    assert!(command.starts_with("qgemm bench --device cpu --shape 1x64x64 --save "), "{command}");
    assert!(origin[3].as_str().is_some_and(|date| date.starts_with("20") && date.ends_with('Z')), "{origin}");
    assert!(origin[4].as_str().is_some_and(|commit| commit.starts_with(env!("CARGO_PKG_VERSION"))), "{origin}");
    // Cases of `verify`.
    let verified = succeeds(&["verify", "--device", "cpu", "--op", "norm", "--shape", "1x64", "--json"]);
    fs::write(path("verify.json"), verified).expect("writable");
    let verified = page(&["--verify", text(&path("verify.json"))]);
    assert_eq!(verified["contents"][1]["rows"][0][1], json!(cpu));
    // A plan of a chip that is not here has no roofs of this machine.
    let plan = path("plan.json");
    let made = succeeds(&["plan", text(&model(folder.path())), "--batch", "1", "--device", "cpu", "--json"]);
    fs::write(&plan, made.replace(&cpu, "Another CPU")).expect("writable");
    let other = page(&["--plan", text(&plan)]).to_string();
    assert!(other.contains("does not record") && !other.contains("roof: ") && !other.contains(&cpu), "{other}");
    let refused = qgemm(&["report", "--results", results, "--peer", "nobody", "--json"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("Marlin int4 g128"), "the peers are listed");
}

/// Headless browser with its own profile.
struct Browser {
    program: PathBuf,
    profile: tempfile::TempDir,
}

impl Browser {
    /// First browser on the path.
    fn find() -> Option<Self> {
        const NAMES: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];
        let folders: Vec<PathBuf> = std::env::split_paths(&std::env::var_os("PATH")?).collect();
        let program = NAMES.iter().flat_map(|name| folders.iter().map(move |f| f.join(name))).find(|p| p.is_file())?;
        Some(Self { program, profile: tempfile::tempdir().expect("writable") })
    }

    /// Output of the browser for `page`.
    fn open(&self, page: &Path, options: &[&str]) -> String {
        let output = self.profile.path().join("output");
        let mut browser = Command::new(&self.program)
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
                "--hide-scrollbars",
            ])
            .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
            .arg(format!("--user-data-dir={}", self.profile.path().join("profile").display()))
            .args(options)
            .arg(format!("file://{}", page.display()))
            .stdout(fs::File::create(&output).expect("writable"))
            .stderr(Stdio::null())
            .spawn()
            .expect("the browser starts");
        let end = Instant::now() + Duration::from_secs(120);
        let status = loop {
            match browser.try_wait().expect("it is a child") {
                Some(status) => break status,
                None if Instant::now() < end => std::thread::sleep(Duration::from_millis(20)),
                None => {
                    browser.kill().expect("it is a child");
                    panic!("the browser did not end in two minutes");
                }
            }
        };
        assert!(status.success(), "{options:?}: {status}");
        fs::read_to_string(output).expect("text")
    }

    /// Opens a page of this size and saves a screenshot.
    fn picture(&self, page: &Path, [width, height]: [u32; 2], options: &[&str], to: &Path) -> Picture {
        let size = format!("--window-size={width},{height}");
        let file = format!("--screenshot={}", to.display());
        self.open(page, &[options, &[size.as_str(), file.as_str()]].concat());
        let decoder = png::Decoder::new(std::io::BufReader::new(fs::File::open(to).expect("a picture was taken")));
        let mut reader = decoder.read_info().expect("a PNG");
        let mut bytes = vec![0; reader.output_buffer_size().expect("it fits into memory")];
        let info = reader.next_frame(&mut bytes).expect("a whole PNG");
        assert_eq!([info.width, info.height], [width, height], "{}", to.display());
        let pixels = bytes.chunks_exact(info.color_type.samples()).map(|p| [p[0], p[1], p[2]]).collect();
        Picture { pixels }
    }
}

struct Picture {
    pixels: Vec<[u8; 3]>,
}

impl Picture {
    /// Checks that the background and the series colours are visible.
    fn shows(&self, background: [u8; 3], series: [[u8; 3]; 2]) {
        let count = |colour| self.pixels.iter().filter(|pixel| **pixel == colour).count();
        let background = count(background) as f64 / self.pixels.len() as f64;
        assert!((0.5..0.99).contains(&background), "{background} of the picture is background");
        // Lines that others cross show only parts.
        series.iter().for_each(|colour| assert!(count(*colour) > 40, "{colour:?}: {} pixels", count(*colour)));
    }
}

/// Page in a frame of a phone's width, because browser windows cannot be as narrow.
/// The frame's sizes become an attribute of the body.
fn on_a_phone(html: &str, [width, height]: [u32; 2]) -> String {
    let inner = html.replace('&', "&amp;").replace('"', "&quot;");
    format!(
        "<!doctype html><meta name=\"color-scheme\" content=\"light dark\">\
         <style>body{{margin:0}}iframe{{display:block;border:0}}</style>\
         <iframe width=\"{width}\" height=\"{height}\" srcdoc=\"{inner}\"></iframe>\
         <script>onload=()=>{{const d=document.querySelector('iframe').contentDocument;\
         const wide=[...d.querySelectorAll('h1,h2,h3,p,svg,.numbers,ul')].filter(e=>e.getBoundingClientRect().right>{width});\
         const small=[...d.querySelectorAll('svg text')].map(e=>[e,e.getScreenCTM()])\
         .map(([e,m])=>parseFloat(getComputedStyle(e).fontSize)*Math.hypot(m.a,m.b));\
         document.body.dataset.seen=[d.documentElement.scrollWidth,wide.length,Math.min(...small)].join(' ')}}</script>"
    )
}

#[test]
fn a_browser_shows_a_report_on_a_desk_and_on_a_phone() {
    let Some(browser) = Browser::find() else {
        qgemm_testkit::skipped(
            "reports in a browser",
            "chromium, chromium-browser and google-chrome are not on the path",
        );
        return;
    };
    // Screenshots are kept for inspection.
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join("report");
    fs::create_dir_all(&kept).expect("writable");
    let page = report(&kept);

    let dom = browser.open(&page, &["--dump-dom"]);
    let sections = dom.matches("<h2>").count();
    assert_eq!((sections, dom.matches("role=\"img\"").count()), (6, 4), "sections and charts");
    assert!(dom.matches("class=\"m\"").count() > 1000 && dom.contains("Marlin int4 g128"));

    let light = browser.picture(&page, [1200, 5200], &[], &kept.join("desk.png"));
    light.shows([0xFF; 3], [[0xC0, 0x12, 0x42], [0x0A, 0x96, 0xAF]]);
    let dark = ["--blink-settings=preferredColorScheme=0"];
    let on_dark = browser.picture(&page, [1200, 5200], &dark, &kept.join("desk-dark.png"));
    on_dark.shows([0x14, 0x17, 0x1A], [[0xFE, 0x59, 0x72], [0x5B, 0xDE, 0xFB]]);

    let size = [390, 8000];
    let phone = kept.join("phone.html");
    fs::write(&phone, on_a_phone(&fs::read_to_string(&page).expect("text"), size)).expect("writable");
    let dom = browser.open(&phone, &["--dump-dom"]);
    let seen = dom.rsplit_once("data-seen=\"").and_then(|(_, rest)| rest.split_once('"')).expect("it was measured").0;
    let seen: Vec<f64> = seen.split(' ').map(|number| number.parse().expect("a number")).collect();
    assert!(seen[0] <= 390.0 && seen[1] == 0.0, "it scrolls sideways: {seen:?}");
    assert!(seen[2] >= 9.0, "words of a chart are {} pixels high", seen[2]);
    let on_phone = browser.picture(&phone, size, &dark, &kept.join("phone-dark.png"));
    on_phone.shows([0x14, 0x17, 0x1A], [[0xFE, 0x59, 0x72], [0x5B, 0xDE, 0xFB]]);
}
