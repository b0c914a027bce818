//! Days of the calendar.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the day in UTC: `2026-11-22`.
pub fn date(now: SystemTime) -> String {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    // Hinnant's `civil_from_days`. Days are counted from 1 March of the year 0, which is 719 468
    // days before 1970, so that a leap day is the last of its year. The calendar's period of 400
    // years has 146 097 days, and from March on every five months have 153.
    let days = seconds / 86_400 + 719_468;
    let (period, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = match month {
        0..10 => (400 * period + year, month + 3),
        _ => (400 * period + year + 1, month - 9),
    };
    format!("{year}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (days, expected) in [
            (0, "1970-01-01"),
            (11_016, "2000-02-29"),
            (11_017, "2000-03-01"),
            (20_088, "2024-12-31"),
            (20_514, "2026-03-02"),
        ] {
            assert_eq!(date(UNIX_EPOCH + Duration::from_secs(days * 86_400 + 86_399)), expected);
        }
    }
}
