//! Makes docs/measurements.md from the rows that comparisons wrote: conditions, tables and plots.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::{Args, CommandFactory};

use crate::Cli;
use crate::contender::Variant;
use crate::documents::write;
use crate::header::Header;
use crate::plot;
use crate::stats::geometric_mean;
use crate::table::Report;
use crate::versus::Row;

/// Flags of `devcomm-bench report`.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// The folder of the JSON files that --json wrote, and of the plots, which are made beside them
    #[arg(value_name = "FOLDER", default_value = "docs/measurements")]
    folder: PathBuf,

    /// The page to write
    #[arg(long, value_name = "FILE", default_value = "docs/measurements.md")]
    out: PathBuf,
}

/// Begins the page.
const INTRODUCTION: &str = "\
# Measurements

This page is made by `devcomm-bench report` from the JSON files in its folder of measurements, which
`devcomm-bench SUBCOMMAND --json FILE` writes. Earlier measurements, and what they taught, are in
[findings.md](findings.md).

Times are microseconds of GPU time per call, of the slowest rank. Each is the median (p50) of the
run's rounds; a round times one batch of every variant, in random order. *p99* is the 99th
percentile of the rounds, that is of batches, in which a slow call is one of many. *noise* is the
interquartile range and *spread* the longest minus the shortest, both in percent of the median; the
first table of a file has the largest noise of the row.
*ratio* is a variant's time over that of the best other, the fastest variant of another library in
the same run; below 1 it is faster. It is the median of the rounds' ratios where the run has it.
*GB/s* is bus bandwidth as nccl-tests defines it. *#wrong* counts wrong elements over all ranks.
Power, clock and temperature are rank 0's. What a file does not have is not shown. In the plots both
axes are logarithmic, and the dashed line is what the links are specified for.
";

/// Reads the folder, and writes page and plots.
pub fn run(options: &Options) -> Result<()> {
    let folder = &options.folder;
    let reading = || format!("cannot read {}", folder.display());
    let mut sections: BTreeMap<String, BTreeMap<String, Report<Row>>> = BTreeMap::new();
    for entry in fs::read_dir(folder).with_context(reading)? {
        let path = entry.with_context(reading)?.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            let report = Report::read(&path)?;
            let subcommand = report.header.as_ref().map_or("", Header::subcommand).to_owned();
            let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            sections.entry(subcommand).or_default().insert(stem, report);
        }
    }
    ensure!(!sections.is_empty(), "{} has no JSON files", folder.display());
    // Links are relative to the page.
    let page_folder = options.out.parent().unwrap_or(Path::new(""));
    let linked = folder.strip_prefix(page_folder).unwrap_or(folder).display().to_string();
    let mut page = INTRODUCTION.to_owned();
    for (subcommand, files) in &sections {
        writeln!(page, "\n## {subcommand}")?;
        if let Some(about) = Cli::command().find_subcommand(subcommand).and_then(|c| c.get_about())
        {
            write!(page, "\n{}", wrapped(&format!("{about}.")))?;
        }
        for (stem, report) in files {
            if let Some(svg) = plot::svg(report) {
                write(&folder.join(stem).with_extension("svg"), &svg)?;
            }
            section(&mut page, &linked, stem, report)?;
        }
    }
    write(&options.out, &page)
}

/// A file's heading, conditions, plot and tables.
fn section(page: &mut String, folder: &str, stem: &str, report: &Report<Row>) -> Result<()> {
    let header = report.header.as_ref().context("a file without a header")?;
    let is_timed = report.rows.iter().any(|row| row.time_us.is_some());
    writeln!(page, "\n### {stem}\n")?;
    page.push_str(&wrapped(&format!("{} [JSON]({folder}/{stem}.json).", conditions(header))));
    if is_timed {
        writeln!(page, "\n![{stem}]({folder}/{stem}.svg)")?;
    }
    let cases = cases(&report.rows);
    let ours = Variant::OURS.into_iter().find(|v| report.rows.iter().any(|row| row.variant == *v));
    if cases.len() > 1 && is_timed {
        let ratios = summary_table(page, &cases, &report.rows, ours)?;
        if let (Some(ours), Some(mean)) = (ours, geometric_mean(ratios.iter().copied())) {
            let text = format!(
                "`{ours}` over the best other: geometric mean {mean:.3} over {} rows, from {:.3} \
                 to {:.3}.",
                ratios.len(),
                ratios.iter().copied().fold(f64::INFINITY, f64::min),
                ratios.iter().copied().fold(0.0, f64::max),
            );
            write!(page, "\n{}", wrapped(&text))?;
        }
        writeln!(page, "\n<details><summary>All columns</summary>")?;
        all_columns(page, &report.rows)?;
        writeln!(page, "\n</details>")?;
    } else {
        all_columns(page, &report.rows)?;
    }
    Ok(())
}

/// The conditions of a run, in a paragraph.
fn conditions(header: &Header) -> String {
    let mut text = header.date.iter().map(|date| format!("{date}. ")).collect::<String>();
    if let Some(machine) = &header.machine {
        let form = if machine.threads { "threads of one process" } else { "one process each" };
        text += &format!("{} x {}", header.ranks, machine.gpu);
        text += &machine.links.iter().map(|links| format!(", {links}")).collect::<String>();
        if header.ranks > 1 {
            text +=
                &format!(", {form}, {} host(s), LSA team of {}", machine.hosts, header.lsa_ranks);
        }
        if let Some(state) = &machine.state {
            text += &format!(
                ", driver {}, SM clock at most {}, memory clock {}, power limit {}",
                state.driver, state.max_sm_clock, state.memory_clock, state.power_limit
            );
        }
        text += &format!(", NCCL {}, NVLS {}, GIN {}", machine.nccl, machine.nvls, machine.gin);
        text += &machine.rma_plugin.iter().map(|name| format!(" by {name}")).collect::<String>();
        text += ". ";
    } else {
        text +=
            &format!("{} simulated GPUs: results are checked, nothing is timed. ", header.ranks);
    }
    if let Some(run) = header.run_options().filter(|_| header.machine.is_some()) {
        text += &format!("{}. ", capitalized(&run.describe()));
    }
    text + &format!("`{}`", header.command.join(" "))
}

fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().into_iter().flat_map(char::to_uppercase).chain(letters).collect()
}

/// A paragraph with lines of at most 100 columns.
fn wrapped(text: &str) -> String {
    let (mut wrapped, mut column) = (String::new(), 0);
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if column > 0 {
            let fits = column + 1 + length <= 100;
            wrapped.push(if fits { ' ' } else { '\n' });
            column = if fits { column + 1 } else { 0 };
        }
        wrapped.push_str(word);
        column += length;
    }
    wrapped + "\n"
}

/// What the variants of a row of the table have in common: text, and a column name.
fn case(row: &Row) -> (String, &'static str) {
    let (what, name) = match (row.shape(), row.size) {
        (Some(shape), _) => (shape.replace('x', " x "), "m x n x k"),
        (None, 0) => (row.grid().unwrap_or_default(), "blocks x threads"),
        (None, size) => (bytes(size), "size"),
    };
    let redop = if ["sum", "-"].contains(&row.redop.as_str()) { "" } else { &row.redop };
    (format!("{what} | {} {redop}", row.dtype).trim_end().to_owned(), name)
}

/// A size in the largest unit in which it is whole.
fn bytes(size: usize) -> String {
    let units = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    let whole = units.into_iter().find(|(_, unit)| size.is_multiple_of(*unit));
    whole.map_or(format!("{size} B"), |(name, unit)| format!("{} {name}", size / unit))
}

/// The rows by case, in order. A case is also of a reduction and a state of the L2 cache; host
/// calls have no grid, so that they belong to all grids of their round.
fn cases(rows: &[Row]) -> Vec<Vec<&Row>> {
    let mut cases: Vec<Vec<&Row>> = Vec::new();
    for row in rows {
        let key = |row: &Row| {
            (row.size, row.count, row.dtype.clone(), row.redop.clone(), row.m, row.n, row.k, row.l2)
        };
        // The variants of a case follow each other, each of them once.
        match cases.last_mut() {
            Some(case)
                if key(case[0]) == key(row)
                    && case.iter().all(|other| other.name() != row.name()) =>
            {
                case.push(row);
            }
            _ => cases.push(vec![row]),
        }
    }
    cases
}

/// A row for each case and columns for each variant. Returns the ratios.
fn summary_table(
    page: &mut String,
    cases: &[Vec<&Row>],
    rows: &[Row],
    ours: Option<Variant>,
) -> Result<Vec<f64>> {
    let mut variants: Vec<String> = Vec::new();
    for row in rows {
        if !variants.contains(&row.name()) {
            variants.push(row.name());
        }
    }
    let rated = rows.iter().all(|row| row.m.is_some());
    let sized = rows.iter().any(|row| row.busbw.is_some());
    let has_algorithm =
        |name: &str| rows.iter().any(|row| row.name() == name && row.algorithm.is_some());
    let value = |row: &Row| if rated { plot::rate(row) } else { row.busbw };
    let mut names = format!("{} | type", case(cases[0][0]).1);
    for variant in &variants {
        write!(names, " | `{variant}` us")?;
        if rated || sized {
            names += if rated { " | TFLOP/s" } else { " | GB/s" };
        }
        if has_algorithm(variant) {
            names += " | algorithm";
        }
    }
    names += " | noise % | ratio | #wrong";
    heading(page, &names)?;
    let mut ratios = Vec::new();
    for rows in cases {
        write!(page, "| {}", case(rows[0]).0)?;
        for variant in &variants {
            let row = rows.iter().find(|row| row.name() == *variant);
            write!(page, " | {}", number(row.and_then(|row| row.time_us), 2))?;
            if rated || sized {
                write!(page, " | {}", number(row.and_then(|row| value(row)), 1))?;
            }
            if has_algorithm(variant) {
                let algorithm = row.and_then(|row| row.algorithm.as_deref());
                // The name, or the first of its parts; all of them are in the other table.
                write!(page, " | {}", algorithm.and_then(|a| a.split(',').next()).unwrap_or("-"))?;
            }
        }
        let noise = rows.iter().filter_map(|row| row.noise_percent).reduce(f64::max);
        let ratio = ours.and_then(|ours| ratio(rows, ours));
        ratios.extend(ratio);
        let wrong = rows.iter().map(|row| row.wrong).sum::<Option<usize>>();
        let (noise, ratio) = (number(noise, 1), number(ratio, 3));
        writeln!(page, " | {noise} | {ratio} | {} |", checked(wrong))?;
    }
    Ok(ratios)
}

/// Our time over the fastest of other libraries.
fn ratio(rows: &[&Row], ours: Variant) -> Option<f64> {
    let row = rows.iter().find(|row| row.variant == ours && !row.in_place)?;
    let others = rows.iter().filter(|row| row.variant.is_of_others());
    let timed = others.filter_map(|row| Some((row.variant, row.time_us?)));
    let (best, time) = timed.min_by(|a, b| a.1.total_cmp(&b.1))?;
    row.time_over_best.or(row.over(best)).or(Some(row.time_us? / time))
}

/// A row for each variant and case, with all that is known of it.
fn all_columns(page: &mut String, rows: &[Row]) -> Result<()> {
    type Column = (&'static str, fn(&Row) -> Option<String>);
    let columns: [Column; 14] = [
        ("us", |row| row.time_us.map(|us| number(Some(us), 2))),
        ("p99 us", |row| row.p99_us.map(|us| number(Some(us), 2))),
        ("noise %", |row| row.noise_percent.map(|percent| number(Some(percent), 1))),
        ("spread %", |row| row.spread_percent.map(|percent| number(Some(percent), 1))),
        ("algorithm GB/s", |row| {
            row.algbw.filter(|_| row.m.is_none()).map(|rate| number(Some(rate), 1))
        }),
        ("GB/s", |row| row.busbw.filter(|_| row.m.is_none()).map(|rate| number(Some(rate), 1))),
        ("TFLOP/s", |row| plot::rate(row).map(|rate| number(Some(rate), 1))),
        ("grid", Row::grid),
        ("algorithm", |row| row.algorithm.clone()),
        ("L2", |row| row.l2.map(|l2| format!("{l2:?}").to_lowercase())),
        ("W", |row| row.power_w.map(|power| number(Some(power), 0))),
        ("MHz", |row| row.sm_mhz.map(|clock| number(Some(clock), 0))),
        ("C", |row| row.temperature_c.map(|temperature| number(Some(temperature), 0))),
        ("#wrong", |row| Some(checked(row.wrong))),
    ];
    let has = |(_, cell): &&Column| rows.iter().any(|row| cell(row).is_some());
    let columns: Vec<&Column> = columns.iter().filter(has).collect();
    let names: Vec<&str> = columns.iter().map(|(name, _)| *name).collect();
    heading(page, &format!("{} | type | variant | {}", case(&rows[0]).1, names.join(" | ")))?;
    for row in rows {
        write!(page, "| {} | `{}`", case(row).0, row.name())?;
        for (_, cell) in &columns {
            write!(page, " | {}", cell(row).unwrap_or("-".to_owned()))?;
        }
        writeln!(page, " |")?;
    }
    Ok(())
}

/// A table's heading.
fn heading(page: &mut String, names: &str) -> Result<()> {
    let rule = "---|".repeat(names.split(" | ").count());
    Ok(writeln!(page, "\n| {names} |\n|{rule}")?)
}

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
}

fn checked(wrong: Option<usize>) -> String {
    wrong.map_or("N/A".to_owned(), |wrong| wrong.to_string())
}
