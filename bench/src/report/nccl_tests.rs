//! nccl-tests' own table, for programs that read it.

use crate::contenders::Variant;
use crate::report::row::{self, Row};

/// The variants that it can show: those that also run in place.
pub const VARIANTS: [Variant; 3] = [Variant::RustOps, Variant::Nccl, Variant::NcclSym];

/// Returns the heading of the table.
pub fn head() -> String {
    let line = |left: [&str; 5], [time, algbw, busbw, wrong]: [&str; 4]| {
        let [size, count, dtype, redop, root] = left;
        let place = format!("  {time:>7}  {algbw:>6}  {busbw:>6}  {wrong:>6}");
        format!("\n# {size:>10}  {count:>12}  {dtype:>8}  {redop:>6}  {root:>6}{place}{place}")
    };
    let names = ["size", "count", "type", "redop", "root"];
    format!("#\n#{:49}{:>23}{:>33}", "", "out-of-place", "in-place")
        + &line(names, ["time", "algbw", "busbw", "#wrong"])
        + &line(["(B)", "(elements)", "", "", ""], ["(us)", "(GB/s)", "(GB/s)", ""])
}

/// Returns the lines of a variant's rows: one for each row out of place and its row in place.
pub fn lines(program: &str, rows: &[Row]) -> String {
    let line = |row: &Row| {
        let dtype = type_name(&row.dtype);
        let redop = if row.redop == "-" { "none" } else { &row.redop };
        let root = if program == "broadcast_perf" { 0 } else { -1 };
        let (size, count) = (row.size, row.count);
        let mut line = format!("{size:12}  {count:12}  {dtype:>8}  {redop:>6}  {root:6}");
        let same = |other: &&Row| {
            let of_other = (other.size, &other.dtype, &other.redop);
            other.in_place && of_other == (row.size, &row.dtype, &row.redop)
        };
        for row in [Some(row), rows.iter().find(same)] {
            let number = |value: fn(&Row) -> Option<f64>, width| {
                row.and_then(value).map_or("N/A".to_owned(), |number| fit(number, width))
            };
            let wrong = row::wrong(row.and_then(|row| row.wrong));
            let (time, algbw) = (number(|row| row.time_us, 7), number(|row| row.algbw, 6));
            let busbw = number(|row| row.busbw, 6);
            line += &format!("  {time:>7}  {algbw:>6}  {busbw:>6}  {wrong:>6}");
        }
        line
    };
    rows.iter().filter(|row| !row.in_place).map(line).collect::<Vec<_>>().join("\n")
}

/// Returns what follows the last of these rows.
pub fn foot(program: &str, rows: &[Row]) -> String {
    let wrong: usize = rows.iter().filter_map(|row| row.wrong).sum();
    let verdict = if wrong == 0 { "OK" } else { "FAILED" };
    let bandwidths: Vec<f64> = rows.iter().filter_map(|row| row.busbw).collect();
    let sum = bandwidths.iter().fold(0.0, |sum, bandwidth| sum + bandwidth);
    let mean = sum / bandwidths.len().max(1) as f64;
    format!(
        "# {:20} : {wrong} {verdict}\n# {:20} : {mean:.4} \n#\n# Collective test concluded: \
         {program}",
        "Out of bounds values", "Avg bus bandwidth"
    )
}

/// Returns nccl-tests' name of a type.
fn type_name(dtype: &str) -> &str {
    match dtype {
        "f32" => "float",
        "f16" => "half",
        "bf16" => "bfloat16",
        "i32" => "int32",
        other => other,
    }
}

/// Returns a number with up to two decimals, as far as they fit in the column.
fn fit(number: f64, width: usize) -> String {
    let text = [2, 1, 0].map(|decimals| format!("{number:.decimals$}"));
    let fits = text.into_iter().find(|text| text.len() <= width);
    fits.unwrap_or_else(|| format!("{number:.0e}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::row::{Case, add_times};

    /// Returns `[size, time, algbw, busbw]` of each row, out of place and in place, and the mean
    /// bus bandwidth, read as SuperBench does: the columns are found by the names in the heading,
    /// counted from the end, between the lines with `out-of-place` and `Out of bounds values`.
    fn parse(output: &str) -> (Vec<[[f64; 4]; 2]>, f64) {
        let lines: Vec<&str> = output.lines().collect();
        let at = |words: &str| lines.iter().rposition(|line| line.contains(words)).unwrap();
        let table = &lines[at("out-of-place") + 1..at("Out of bounds values")];
        let heading = table.iter().find(|line| line.contains("busbw")).unwrap();
        let names: Vec<&str> = heading[1..].split_whitespace().collect();
        let column = |name: &str, in_place: bool| {
            let found = match in_place {
                false => names.iter().position(|other| *other == name),
                true => names.iter().rposition(|other| *other == name),
            };
            names.len() - found.unwrap()
        };
        let row = |line: &&str| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words.first().filter(|first| first.starts_with(|c: char| c.is_ascii_digit()))?;
            Some([false, true].map(|in_place| {
                ["size", "time", "algbw", "busbw"]
                    .map(|name| words[words.len() - column(name, in_place)].parse().unwrap())
            }))
        };
        let mean = lines[at("Avg bus bandwidth")].split(':').nth(1).unwrap();
        (table.iter().filter_map(row).collect(), mean.trim().parse().unwrap())
    }

    #[test]
    fn a_program_that_reads_nccl_tests_reads_the_table() {
        let rows = [(1 << 10, 2.5e-6, 3.0), (1 << 30, 0.0123456, 1.5)].map(|(size, time, bus)| {
            let (dtype, redop) = ("bf16", "sum");
            let case = Case { size, count: size / 2, dtype, redop, bus, ..Case::NONE };
            let row = |in_place| Row { in_place, ..case.row(Variant::RustOps) };
            let mut rows = [false, true].map(row);
            add_times(&mut rows, bus, &[], Some(&vec![vec![time, 2.0 * time]]));
            rows
        });
        let rows = rows.concat();
        let program = "all_reduce_perf";
        let text = [head(), lines(program, &rows), foot(program, &rows)].join("\n");
        let (read, mean) = parse(&format!("# devcomm-bench all-reduce\n{text}\n"));
        let (long, rate) = (2f64.powi(30), 2f64.powi(30) / 0.0123456 / 1e9);
        let expected = [
            [[1024.0, 2.5, 0.41, 1.23], [1024.0, 5.0, 0.2, 0.61]],
            [[long, 12345.6, 86.97, 130.46], [long, 24691.2, 43.49, 65.23]],
        ];
        assert_eq!(read, expected, "{text}");
        let all = [1.2288, 0.6144, 1.5 * rate, 0.75 * rate];
        assert!((mean - all.iter().sum::<f64>() / 4.0).abs() < 1e-4, "{text}");
        assert!(text.contains("  1073741824     536870912  bfloat16     sum      -1"), "{text}");
        let head = |line: usize| text.lines().nth(line).unwrap().len();
        assert_eq!((head(2), head(3), head(4)), (head(5), head(5), head(5)), "{text}");
    }

    #[test]
    fn a_row_in_place_is_of_the_same_reduction() {
        let row = |redop, in_place| {
            let case = Case { size: 1024, count: 256, dtype: "f32", redop, ..Case::NONE };
            Row { in_place, time_us: Some(7.5), ..case.row(Variant::RustOps) }
        };
        let text = lines("all_reduce_perf", &[row("sum", false), row("max", true)]);
        assert!(text.contains("7.50") && text.contains("N/A"), "{text}");
    }

    #[test]
    fn wide_numbers_lose_decimals() {
        assert_eq!(
            [1.0, 12345.67, 123456.7, 1.5e6].map(|x| fit(x, 7)),
            ["1.00", "12345.7", "123457", "1500000"]
        );
        assert_eq!(fit(1.5e8, 6), "2e8");
    }
}
