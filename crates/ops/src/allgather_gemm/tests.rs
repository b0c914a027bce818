//! Tests of plans of `AllGatherGemm`.

use super::*;

#[test]
fn plans_are_read_as_they_are_written() {
    for text in ["unfused", "fused"] {
        assert_eq!(text.parse::<AllGatherGemmPlan>().unwrap().to_string(), text);
    }
    let error = "ring".parse::<AllGatherGemmPlan>().unwrap_err().to_string();
    assert_eq!(error, "`ring` is no plan: unfused or fused");
}
