//! Tests of plans of `GemmReduceScatter`.

use super::*;

#[test]
fn plans_are_read_as_they_are_written() {
    for text in ["unfused", "wide"] {
        assert_eq!(text.parse::<GemmReduceScatterPlan>().unwrap().to_string(), text);
    }
    let error = "ring".parse::<GemmReduceScatterPlan>().unwrap_err().to_string();
    assert_eq!(error, "`ring` is no plan: unfused or wide");
}
